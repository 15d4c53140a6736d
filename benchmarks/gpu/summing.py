"""A rank of the sums in `machine`: `python -m benchmarks.gpu.summing JOB` checks, then times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tp_transformers.ranks import direct
from tp_transformers.ranks.mesh import join

from .device import device_of

COUNT = 30


def join_ranks(kind: str, backend: str, store: str, rank: int, size: int) -> None:
    """Start the group of all ranks, which share the GPUs if there are more ranks."""
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = f"cpu:gloo,cuda:{backend}" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def main() -> None:
    """Run the job in argv."""
    job = json.loads(sys.argv[1])
    device, rank, size = device_of(job["kind"]), job["rank"], job["size"]
    join_ranks(job["kind"], job["backend"], job["store"], rank, size)
    group = join(init_device_mesh(job["kind"], (size,), mesh_dim_names=("tp",))).process_group
    seconds: dict[int, float] = {}
    for nbytes in job["nbytes"]:
        x = torch.arange(nbytes // 2, device=job["kind"]).remainder(8).to(torch.bfloat16)
        total = x * (rank + 1)
        direct.all_reduce(total, group)
        if not torch.equal(total, x * (size * (size + 1) // 2)):
            raise ValueError(f"a wrong sum of {nbytes} bytes")
        zeros = torch.zeros_like(x)

        def step(zeros: Any = zeros) -> None:
            direct.all_reduce(zeros, group)

        device.seconds(step, 5)
        seconds[nbytes] = device.seconds(step, COUNT)
    dist.barrier()
    dist.destroy_process_group()
    Path(job["result"]).write_text(json.dumps({"seconds": seconds}), encoding="utf-8")


if __name__ == "__main__":
    main()
