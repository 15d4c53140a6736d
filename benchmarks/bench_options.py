"""Options of a load against each other: `python -m benchmarks.bench_options shares` or `invariant`.

`shares`: `tp_shares="speed"`, which measures the ranks at the load, against even shares, with one slow rank: it is
stopped for half of the time, as if its device had half the speed. `invariant`: `tp_invariant=True` against the usual
plan. Every rank loads the same random Llama once a side. Logits are compared first. Then steps are timed, alternating
the sides.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import machine, processes
from .load_options import PROMPT, SHAPE, TOKENS, Job
from .report import save, shown_machine, shown_spread, slowest, spread

SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "shares": {"even": {}, "speed": {"tp_shares": "speed"}},
    "invariant": {"usual": {}, "invariant": {"tp_invariant": True}},
}
"""Comparison -> its sides, each with its options; ratios are against the first."""
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the benchmark; returns 1 if a process fails, takes too long, or computes something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_options", description=__doc__)
    add = parser.add_argument
    add("comparison", choices=SIDES)
    add("--ranks", type=int, default=2, help="number of ranks, each on a core of its own (default: 2)")
    add("--rounds", type=int, default=9, help="how often every side takes a step (default: 9)")
    add("--results", type=Path, default=RESULTS, help="where the numbers go")
    add("--timeout", type=float, default=300, help="seconds that it may take")
    arguments = parser.parse_args()
    size, sides, is_slowed = arguments.ranks, SIDES[arguments.comparison], arguments.comparison == "shares"
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(folder=scratch, size=size, rank=0, rounds=arguments.rounds, sides=sides, is_slowed=is_slowed)
        try:
            ranks = processes.run_ranks("benchmarks.load_options", job, timeout=arguments.timeout)
        except (processes.ProcessError, OSError) as error:
            print(f"bench_options: {error}", file=sys.stderr)
            return 1
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.bench_options", *sys.argv[1:]]),
        "machine": machine.facts(),
        "ranks": size,
        "rounds": arguments.rounds,
        "is_slowed": is_slowed,
        "shares": ranks[0]["shares"],
        "held": {side: [rank["held"][side] for rank in ranks] for side in sides},
        "tasks": {task: summary([rank["seconds"][task] for rank in ranks]) for task in ranks[0]["seconds"]},
    }
    text = table(result)
    print(text)
    path = arguments.results / f"{arguments.comparison}-cpu"
    save(path, result, text)
    print(f"{path}.json, .md")
    return 0


def summary(ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Seconds of each side on the slowest rank, and the ratios of the first side to each."""
    seconds = slowest(ranks)
    first = next(iter(seconds.values()))
    return {
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "ratios": {
            side: spread([usual / own for usual, own in zip(first, values, strict=True)])
            for side, values in seconds.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all tasks; the machine and versions are below it."""
    first, *_ = result["held"]
    lines = [f"| task | side | bytes of each rank | seconds | `{first}` takes |", "| --- | --- | --- | --- | --- |"]
    for task, found in result["tasks"].items():
        for side in result["held"]:
            shares = result["shares"][side]
            shown = f"{side}: {' : '.join(f'{share:g}' for share in shares)}" if shares else side
            held = ", ".join(f"{nbytes / 1e6:.0f} MB" for nbytes in result["held"][side])
            median, ratio = found["seconds"][side]["median"], shown_spread(found["ratios"][side])
            lines.append(f"| {task} | {shown} | {held} | {median:.3f} | {ratio} |")
    about = result["machine"]
    stopped = ", the last stopped for half of the time" if result["is_slowed"] else ""
    remarks = [
        f"{result['ranks']} ranks of one thread{stopped}; Llama of "
        f"{SHAPE['hidden_size']} x {SHAPE['intermediate_size']}, {SHAPE['num_hidden_layers']} layers, bf16; a prompt "
        f"of {PROMPT} tokens, {TOKENS} generated tokens, a training step of {PROMPT}",
        f"{result['rounds']} rounds, the sides in turn, the slowest rank, median (min to max); {about['date']}",
        shown_machine(about),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
