"""One rank of `bench_collectives`: `python -m benchmarks.collectives JOB` times shared memory and gloo alternately."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_transformers.ranks import direct
from tp_transformers.ranks.direct import BACKEND, connect, transport_of

SIDES = ("memory", "gloo")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "vote")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """The job of one rank."""

    store: str
    """File for the rendezvous of the ranks."""
    size: int
    rank: int
    rounds: int
    kinds: list[str]
    nbytes: list[int]
    """Tensor sizes of a rank."""
    result: str = ""


def main() -> None:
    """Run the job in argv, and write its result: seconds of a collective, by kind, dtype, bytes, side and round."""
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", store=dist.FileStore(job.store, job.size), rank=job.rank, world_size=job.size)
    groups = {side: dist.new_group() for side in SIDES}
    connect(groups["memory"])
    if transport_of(groups["memory"]) is BACKEND:
        raise RuntimeError("ranks share no memory here")
    found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    for kind in job.kinds:
        for name, dtype in DTYPES.items() if kind != "vote" else [("", torch.uint8)]:
            for nbytes in job.nbytes if kind != "vote" else job.nbytes[:1]:
                x = torch.ones(max(nbytes // dtype.itemsize // job.size, 1) * job.size, dtype=dtype)
                calls = {side: _call(kind, x, group) for side, group in groups.items()}
                taken: dict[str, list[float]] = {side: [] for side in SIDES}
                times = {side: _times(call) for side, call in calls.items()}
                for turn in range(job.rounds):
                    for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                        taken[side].append(_seconds(calls[side], times[side]))
                found.setdefault(kind, {}).setdefault(name, {})[str(nbytes)] = taken
    Path(job.result).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _call(kind: str, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    if kind == "vote":
        memory, answers = transport_of(group), [None] * group.size()
        if memory is not BACKEND:
            return lambda: memory.messages(b"a vote of a load")
        return lambda: dist.all_gather_object(answers, "a vote of a load", group=group)
    if kind == "all_reduce":  # of ones: the sum stays finite as a maximum does
        return lambda: direct.all_reduce(x, group) or x.fill_(1)
    if kind == "all_gather":
        return lambda: direct.all_gather(x, group)
    return lambda: direct.reduce_scatter(x, group)


def _times(call: Callable[[], Any]) -> int:
    """Number of calls per round, for about 20 ms; the same on all ranks."""
    for _ in range(3):
        call()
    times = torch.tensor([max(1, min(200, int(0.02 / _seconds(call, 3))))])
    dist.broadcast(times, 0)
    return int(times)


def _seconds(call: Callable[[], Any], times: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    main()
