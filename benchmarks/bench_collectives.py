"""Collectives of CPU tensors through shared memory, against gloo: `python -m benchmarks collectives`.

Ranks on this machine time both alternately, on the same tensors; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from typing import Any

from . import machine, processes
from .collectives import KINDS, SIDES, Job
from .report import shown_machine, shown_spread, slowest, spread


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--ranks", default="2,4,8", help="numbers of ranks (default: 2,4,8)")
    add("--kinds", default=",".join(KINDS), help="(default: all)")
    add("--nbytes", default="4096,32768,4194304", help="sizes of tensors")
    add("--rounds", type=int, default=9, help="how often each side takes its turn (default: 9)")
    add("--timeout", type=float, default=600, help="seconds that one number of ranks may take")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all numbers of ranks. Raises ProcessError if a process fails or takes too long."""
    result |= {"rounds": arguments.rounds, "ranks": {}}
    for size in map(int, arguments.ranks.split(",")):
        result["ranks"][str(size)] = found = _summary(_run(arguments, size))
        print(*_rows(str(size), found), sep="\n", flush=True)


def file(arguments: argparse.Namespace) -> str:
    """The name of the table."""
    return "collectives-cpu"


def _run(arguments: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(
            store=f"{scratch}/store",
            size=size,
            rank=0,
            rounds=arguments.rounds,
            kinds=arguments.kinds.split(","),
            nbytes=[int(each) for each in arguments.nbytes.split(",")],
        )
        return processes.run(
            "benchmarks.collectives",
            [{**dataclasses.asdict(job), "rank": rank} for rank in range(size)],
            timeout=arguments.timeout,
            env=[{"OMP_NUM_THREADS": str(max(1, machine.facts()["cores"] // size))} for _ in range(size)],
        )


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind, dtype and size: seconds of each side on the slowest rank, and the ratio gloo to memory."""
    found: dict[str, Any] = {}
    for kind, dtypes in ranks[0].items():
        for dtype, sizes in dtypes.items():
            for nbytes in sizes:
                seconds = slowest([rank[kind][dtype][nbytes] for rank in ranks])
                ratio = spread([gloo / own for gloo, own in zip(seconds["gloo"], seconds["memory"], strict=True)])
                row = {"seconds": {side: spread(seconds[side]) for side in SIDES}, "ratio": ratio}
                found.setdefault(kind, {}).setdefault(dtype, {})[nbytes] = row
    return found


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all numbers of ranks, kinds and sizes; the machine and versions are below it."""
    lines = [
        "| collective | ranks | dtype | bytes of a rank | memory | gloo | gloo by memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row for size, found in result["ranks"].items() for row in _rows(size, found)),
    ]
    about = result["machine"]
    remarks = [
        f"{result['rounds']} rounds, the sides in turn, the slowest rank, median (min to max); {about['date']}",
        "a vote is a short message of every rank to all; gloo's is torch's all_gather_object",
        shown_machine(about),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


def _rows(size: str, found: dict[str, Any]) -> list[str]:
    rows = []
    for kind, dtypes in found.items():
        for dtype, sizes in dtypes.items():
            for nbytes, row in sizes.items():
                times = " | ".join(f"{row['seconds'][side]['median'] * 1e6:.0f} us" for side in SIDES)
                shown = f"{int(nbytes):,}" if kind != "vote" else ""
                rows.append(f"| {kind} | {size} | {dtype} | {shown} | {times} | {shown_spread(row['ratio'])} |")
    return rows
