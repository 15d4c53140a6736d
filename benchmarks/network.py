"""One rank of `bench_network`: `python -m benchmarks.network JOB` times gloo's messages and sums alone."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

SUMS = {"token": (1 << 13, 200), "prompt": (1 << 24, 7)}
"""Name -> bytes of a sum, and how often it is timed: one token, and 2,000, of hidden size 4,096 in bf16."""


@dataclass(frozen=True)
class Job:
    """The job of one rank."""

    store: str
    size: int
    rank: int
    result: str = ""


def main() -> None:
    """Run the job in argv, and write the median seconds of a round trip and of each sum."""
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", store=dist.FileStore(job.store, job.size), rank=job.rank, world_size=job.size)
    found = {"round trip": round_trip(job.rank)}
    for name, (nbytes, times) in SUMS.items():
        values, seconds = torch.ones(nbytes // 4), []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(seconds)
    Path(job.result).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def round_trip(rank: int, times: int = 500) -> float:
    """Median seconds of a number's way from rank 0 to rank 1 and back."""
    number, seconds = torch.ones(1), []
    for _ in range(times):
        began = time.perf_counter()
        for step in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            step(number, 1 - rank)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
