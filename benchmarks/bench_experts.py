"""Expert parallelism (all-to-all) against sharded experts (all-gather): `python -m benchmarks.bench_experts`.

Every rank has its own tokens, and its shard of the same random mixture of experts twice: complete experts that receive
their tokens (`moe_all_to_all`), and sharded experts, which gather the tokens of all ranks. Losses and gradient norms
are compared first. Then the bytes that ranks send in a training step (a forward and a backward, gradients not averaged)
are counted, and steps are timed, alternating the sides.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import machine, processes
from .experts import CUTS, LENGTH, MODELS, SAMPLES, SIDES, Job
from .report import save, shown_machine, shown_spread, slowest, spread

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the benchmark; returns 1 if a process fails, takes too long, or computes something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_experts", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="number of ranks (default: 4)")
    add("--rounds", type=int, default=9, help="how often every side takes a step (default: 9)")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--results", type=Path, default=RESULTS, help="where the numbers go")
    add("--timeout", type=float, default=600, help="seconds that one model may take")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.bench_experts", *sys.argv[1:]]),
        "machine": machine.facts(),
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "models": {},
    }
    try:
        for model in arguments.models:
            for cut in CUTS:
                result["models"].setdefault(model, {})[cut] = summary(_run(arguments, model, cut))
    except (processes.ProcessError, OSError) as error:
        print(f"bench_experts: {error}", file=sys.stderr)
        return 1
    text = table(result)
    print(text)
    path = arguments.results / "experts-cpu"
    save(path, result, text)
    print(f"{path}.json, .md")
    return 0


def _run(arguments: argparse.Namespace, model: str, cut: str) -> list[dict[str, Any]]:
    size = arguments.ranks
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(model=model, cut=cut, folder=scratch, size=size, rank=0, rounds=arguments.rounds)
        return processes.run_ranks("benchmarks.experts", job, timeout=arguments.timeout)


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For each side: bytes that all ranks send, for experts and in total; seconds of the slowest rank, and ratios."""
    sent = {side: sum(sum(rank["nbytes"][side].values()) for rank in ranks) for side in SIDES}
    exchanged = sum(rank["nbytes"]["exchange"]["alltoall_base"] for rank in ranks)
    others = sent["exchange"] - exchanged  # attention, and around the layers; equal on both sides
    seconds = slowest([rank["seconds"] for rank in ranks])
    return {
        "sent": sent,
        "sent_for_experts": {side: nbytes - others for side, nbytes in sent.items()},
        "counts": {side: ranks[0]["counts"][side] for side in SIDES},
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "ratios": {
            side: spread([other / own for other, own in zip(seconds[side], seconds["exchange"], strict=True)])
            for side in SIDES
        },
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all models and layouts; the machine and versions are below it."""
    lines = [
        "| model | ranks have their own | experts | sent for experts | by exchange | a training step | by exchange |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, cuts in result["models"].items():
        for cut, found in cuts.items():
            for side in SIDES:
                nbytes, ratio = found["sent_for_experts"], found["ratios"][side]
                more = nbytes[side] / nbytes["exchange"]
                spent = f"{found['seconds'][side]['median'] * 1e3:.0f} ms"
                cells = (f"{nbytes[side] / 1e6:.1f} MB", f"{more:.2f}", spent, shown_spread(ratio))
                lines.append(f"| {model} | {cut} | {side} | {' | '.join(cells)} |")
    about = result["machine"]
    remarks = [
        f"{result['ranks']} gloo ranks, {SAMPLES} samples of {LENGTH} tokens a rank, fp32; {result['rounds']} rounds, "
        f"the sides in turn, the slowest rank, median (min to max); {about['date']}",
        "sent: bytes from all ranks to others in a forward and a backward, beside those that every side sends for "
        "attention and around the layers",
        shown_machine(about),
        f"`{result['command']}`",
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
