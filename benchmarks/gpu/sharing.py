"""A rank of those in `decode` that share a device: `python -m benchmarks.gpu.sharing JOB` loads, and times steps."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .decode import PROMPT, ROOM, STEPS
from .decoding import Decoder
from .shapes import load
from .step import Job
from .summing import join_ranks


def main() -> None:
    """Run the job in argv."""
    job = json.loads(sys.argv[1])
    of_step = Job(**job["job"])
    join_ranks(of_step.kind, of_step.backend, job["store"], job["rank"], job["size"])
    began = time.perf_counter()
    mesh = init_device_mesh(of_step.kind, (job["size"],), mesh_dim_names=("tp",))
    model = load("ours", Path(job["folder"]), mesh, of_step)
    loaded = time.perf_counter() - began
    prompt, room, steps = (8, 32, 4) if of_step.rehearses else (PROMPT, ROOM, STEPS)
    decoder = Decoder(model, of_step.device, batch=1, prompt=prompt, room=room)
    step = decoder.eager()
    tokens = decoder.tokens(step, steps).tolist()
    decoder.prefill()
    found = {
        "load": loaded,
        "tokens": tokens,
        "backend": of_step.backend,
        "seconds": decoder.device.seconds(step, steps),
    }
    dist.barrier()
    dist.destroy_process_group()
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
