"""Collectives of CPU tensors through shared memory, against gloo: `python -m benchmarks collectives`.

Ranks on this machine time both alternately, on the same tensors; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_transformers.ranks import direct
from tp_transformers.ranks.direct import BACKEND, connect, transport_of

from . import processes
from .ranks import in_turn, joined
from .report import compared, listed, numbers, page, shown_spread

SIDES = ("memory", "gloo")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "vote")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--ranks", type=numbers, default="2,4,8", help="numbers of ranks (default: 2,4,8)")
    add("--kinds", type=listed(KINDS), default=",".join(KINDS), help="(default: all)")
    add("--nbytes", type=numbers, default="4096,32768,4194304", help="sizes of tensors")
    add("--rounds", type=int, default=9, help="how often each side takes its turn (default: 9)")
    add("--timeout", type=float, default=600, help="seconds that one number of ranks may take")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all numbers of ranks. Raises ProcessError if a process fails or takes too long."""
    result |= {"rounds": arguments.rounds, "ranks": {}}
    for size in arguments.ranks:
        job = {"size": size, "rounds": arguments.rounds, "kinds": arguments.kinds, "nbytes": arguments.nbytes}
        ranks = processes.run_ranks(f"{__name__}:on_rank", job, timeout=arguments.timeout)
        result["ranks"][str(size)] = found = _summary(ranks)
        print(*_rows(str(size), found), sep="\n", flush=True)


def on_rank(store: str, rank: int, size: int, rounds: int, kinds: list[str], nbytes: list[int]) -> list[dict[str, Any]]:
    """The kind, dtype and bytes of a rank of each measurement, with the seconds of a call by side and round."""
    rows = []
    with joined(store, rank, size):
        groups = {side: dist.new_group() for side in SIDES}
        connect(groups["memory"])
        if transport_of(groups["memory"]) is BACKEND:
            raise RuntimeError("ranks share no memory here")
        for kind in kinds:
            for name, dtype in DTYPES.items() if kind != "vote" else [("", torch.uint8)]:
                for count in nbytes if kind != "vote" else nbytes[:1]:
                    x = torch.ones(max(count // dtype.itemsize // size, 1) * size, dtype=dtype)
                    calls = {side: _call(kind, x, group) for side, group in groups.items()}
                    timed = {side: partial(_seconds, call, _times(call)) for side, call in calls.items()}
                    rows.append({"kind": kind, "dtype": name, "bytes": count, "seconds": in_turn(timed, rounds)})
    return rows


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


def _summary(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The measurements, with the seconds of the slowest rank, and the ratios of gloo's to those of shared memory."""
    return [{**rows[0], **compared([row["seconds"] for row in rows], "memory")} for rows in zip(*ranks, strict=True)]


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all numbers of ranks, kinds and sizes; the machine and versions are below it."""
    return page(
        result,
        ["collective", "ranks", "dtype", "bytes of a rank", "memory", "gloo", "gloo by memory"],
        [row for size, found in result["ranks"].items() for row in _rows(size, found)],
        f"{result['rounds']} rounds, the sides in turn, the slowest rank, median (min to max)",
        "a vote is a short message of every rank to all; gloo's is torch's all_gather_object",
    )


def _rows(size: str, found: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in found:
        times = " | ".join(f"{row['seconds'][side]['median'] * 1e6:.0f} us" for side in SIDES)
        shown = f"{row['bytes']:,}" if row["kind"] != "vote" else ""
        rows.append(
            f"| {row['kind']} | {size} | {row['dtype']} | {shown} | {times} | {shown_spread(row['ratios']['gloo'])} |"
        )
    return rows
