"""Optimizers on ranks, against one process: `python -m benchmarks.bench_optimizers`.

Trains a small random Llama in fp32 with every optimizer, 20 steps on ranks and in one process of plain transformers:
the loss of each step, the weights after the last, their exponential moving average, the bytes of the states of a rank,
and 5 steps more on another number of ranks, which load the states. One process with the samples in reverse order shows
how far rounding alone carries an optimizer. Packages that are not installed are left out: `make optimizers` puts them
into a folder for PYTHONPATH. Returns 1 if weights differ by more than 50 times that, and by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from . import machine, processes
from .adapters import LENGTH, SAMPLES
from .optimizers import MODEL, MORE, OPTIMIZERS, STEPS, Job
from .report import save, shown_machine

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("losses", "weights", "average", "resumed")
TOLERANCE = 1e-5


def main() -> int:
    """Run the benchmark; writes `results/optimizers-cpu.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_optimizers", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="(default: 2 3)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the numbers go")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a number of ranks (default: 900)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(f"{scratch}/model")
        try:
            for size in arguments.ranks:
                job = Job(f"{scratch}/model", arguments.optimizers, f"{scratch}/states", size, 0, f"{scratch}/{size}")
                ranks = processes.run_ranks("benchmarks.optimizers", job, timeout=arguments.timeout)
                rows += [{"ranks": size, **row} for row in summary(ranks, arguments.optimizers)]
        except processes.ProcessError as error:
            print(f"bench_optimizers: {error}", file=sys.stderr)
            return 1
    result = {"command": "python -m benchmarks.bench_optimizers", "machine": machine.facts(), "rows": rows}
    save(arguments.results / "optimizers-cpu", result, page(result))
    print(page(result))
    return int(any(row["weights"] > max(TOLERANCE, 50 * row["rounding"]["weights"]) for row in rows))


def summary(ranks: list[dict[str, Any]], optimizers: list[str]) -> list[dict[str, Any]]:
    """A row for each optimizer that is installed, with the largest number of any rank."""
    rows = []
    for name in optimizers:
        seen = [found[name] for found in ranks]
        if seen[0] is not None:
            largest = {key: max(each[key] for each in seen) for key in (*COLUMNS, "bytes") if key in seen[0]}
            rows.append({"optimizer": name, **seen[0], **largest})
    return rows


def page(result: dict[str, Any]) -> str:
    """The result in Markdown: a row for each optimizer, with the numbers of ranks side by side."""
    rows = result["rows"]
    sizes = " / ".join(str(size) for size in dict.fromkeys(row["ranks"] for row in rows))
    lines = [
        "| optimizer | loss | losses | weights | average | rounding | resumed | states alone and by rank, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    refused = {}
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        found = [row for row in rows if row["optimizer"] == name]
        cells = [" / ".join(f"{row[key]:.0e}" for row in found) for key in COLUMNS[:-1]]
        resumed = " / ".join(f"{row['resumed']:.0e}" for row in found if "resumed" in row) or "-"
        first, last = found[0]["fell"]
        rounding = found[0]["rounding"]
        held = " / ".join(
            f"{nbytes / 1e6:.2f}" for nbytes in [found[0]["bytes of one process"], *(row["bytes"] for row in found)]
        )
        cells += [f"{rounding['losses']:.0e}, {rounding['weights']:.0e}", resumed, held]
        lines.append(f"| {name} | {first:.2f} → {last:.2f} | {' | '.join(cells)} |")
        refused |= {name: found[0]["not saved"]} if "not saved" in found[0] else {}
    return (
        f"`{result['command']}`\n\nA Llama of 2 layers, 144 features, 9 query and 3 KV heads, random weights, fp32, "
        f"{STEPS} steps of {SAMPLES} x {LENGTH} tokens; on {sizes} ranks. Differences from one process, relative: of "
        "any step's loss, of the weights after the last step, of their moving average (`AveragedModel`). Rounding: the "
        "same differences, losses and weights, of one process from itself, with the samples in reverse order. Resumed: "
        f"the losses of {MORE} steps more on the last number of ranks, with states that the one before had saved. "
        f"{shown_machine(result['machine'])}; {result['machine']['date']}.\n\n"
        + "\n".join(lines)
        + "\n\nStates that do not move to another number of ranks:\n\n"
        + "\n".join(f"- {name}: {text}" for name, text in refused.items())
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
