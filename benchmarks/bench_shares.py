"""Shares by speed against even shares, with one slow rank: `python -m benchmarks.bench_shares`.

The last rank is stopped for half of the time, as if its device had half the speed. Every rank has its shard of the same
random Llama twice: split evenly, and by `tp_shares="speed"`, which measures the ranks at the load. Logits are compared
first. Then steps are timed, alternating the sides.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import machine, processes
from .report import save, shown_machine, shown_spread, slowest, spread
from .shares import PROMPT, SHAPE, SIDES, TOKENS, Job

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the benchmark; returns 1 if a process fails, takes too long, or computes something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_shares", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks, each on a core of its own (default: 2)")
    add("--rounds", type=int, default=9, help="how often every side takes a step (default: 9)")
    add("--results", type=Path, default=RESULTS, help="where the numbers go")
    add("--timeout", type=float, default=300, help="seconds that it may take")
    arguments = parser.parse_args()
    size = arguments.ranks
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(folder=scratch, size=size, rank=0, rounds=arguments.rounds)
        try:
            ranks = processes.run_ranks("benchmarks.shares", job, timeout=arguments.timeout)
        except (processes.ProcessError, OSError) as error:
            print(f"bench_shares: {error}", file=sys.stderr)
            return 1
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.bench_shares", *sys.argv[1:]]),
        "machine": machine.facts(),
        "ranks": size,
        "rounds": arguments.rounds,
        "shares": ranks[0]["shares"],
        "held": {side: [rank["held"][side] for rank in ranks] for side in SIDES},
        "tasks": {task: summary([rank["seconds"][task] for rank in ranks]) for task in ranks[0]["seconds"]},
    }
    text = table(result)
    print(text)
    path = arguments.results / "shares-cpu"
    save(path, result, text)
    print(f"{path}.json, .md")
    return 0


def summary(ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Seconds of each side on the slowest rank, and the ratios of even shares to each side."""
    seconds = slowest(ranks)
    pairs = {side: zip(seconds["even"], values, strict=True) for side, values in seconds.items()}
    return {
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "ratios": {side: spread([even / own for even, own in pairs[side]]) for side in seconds},
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all tasks; the machine and versions are below it."""
    lines = ["| task | shares | bytes of each rank | seconds | even shares take |", "| --- | --- | --- | --- | --- |"]
    for task, found in result["tasks"].items():
        for side in SIDES:
            shares = " : ".join(f"{share:g}" for share in result["shares"][side] or [1] * result["ranks"])
            held = ", ".join(f"{nbytes / 1e6:.0f} MB" for nbytes in result["held"][side])
            median, ratio = found["seconds"][side]["median"], shown_spread(found["ratios"][side])
            lines.append(f"| {task} | {side}: {shares} | {held} | {median:.3f} | {ratio} |")
    about = result["machine"]
    remarks = [
        f"{result['ranks']} ranks of one thread, the last stopped for half of the time; Llama of "
        f"{SHAPE['hidden_size']} x {SHAPE['intermediate_size']}, {SHAPE['num_hidden_layers']} layers, bf16; a prompt "
        f"of {PROMPT} tokens, {TOKENS} generated tokens, a training step of {PROMPT}",
        f"{result['rounds']} rounds, the sides in turn, the slowest rank, median (min to max); {about['date']}",
        shown_machine(about),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
