"""One of two ranks on one device: `python -m benchmarks.gpu.probe JOB` sums by a backend, and checks the sum."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Run the job in argv."""
    job = json.loads(sys.argv[1])
    backend = f"cuda:{job['backend']}" if job["kind"] == "cuda" else job["backend"]
    dist.init_process_group(backend, init_method=f"file://{job['store']}", rank=job["rank"], world_size=2)
    x = torch.full((1000,), float(job["rank"] + 1), device=job["kind"])
    dist.all_reduce(x)
    if x.tolist() != [3.0] * 1000:
        raise ValueError(f"the sum of 1 and 2 is {x.unique().tolist()}")
    dist.destroy_process_group()
    Path(job["result"]).write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main()
