"""PEFT's methods on ranks, against one process: `python -m benchmarks.bench_adapters`.

Trains every method on small random models in fp32, 20 steps on ranks and in one process of plain transformers: the loss
of each step, the adapter's weights after the last, the logits of the saved adapter that one process loads, and those
after `merge_and_unload`. Returns 1 if a method that is not refused differs by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from . import machine, processes
from .adapters import LENGTH, METHODS, MODELS, SAMPLES, STEPS, Job
from .report import save, shown_machine

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("losses", "weights", "loaded in one process", "merged")
TOLERANCE = {"losses": 1e-4, "weights": 1e-2, "loaded in one process": 1e-4, "merged": 1e-4}
"""Relative; sums in another order, which AdamW divides by the root of small squares, through 20 steps."""


def main() -> int:
    """Run the benchmark; writes `results/adapters-cpu.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_adapters", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="(default: 2 3)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the numbers go")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that a model may take (default: 900)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        for model in arguments.models:
            with tempfile.TemporaryDirectory() as scratch:
                make_model(model, f"{scratch}/model")
                for size in arguments.ranks:
                    store = f"{scratch}/store-{size}"
                    job = Job(f"{scratch}/model", model, arguments.methods, size, 0, store)
                    ranks = processes.run_ranks("benchmarks.adapters", job, timeout=arguments.timeout)
                    rows += [{"model": model, "ranks": size, **found} for found in summary(ranks, arguments.methods)]
                    print(f"{model} on {size} ranks", file=sys.stderr, flush=True)
    except processes.ProcessError as error:
        print(f"bench_adapters: {error}", file=sys.stderr)
        return 1
    result = {"command": "python -m benchmarks.bench_adapters", "machine": machine.facts(), "rows": rows}
    save(arguments.results / "adapters-cpu", result, page(result))
    print(page(result))
    errors = [(row[name], TOLERANCE[name]) for row in rows for name in COLUMNS if row.get(name) is not None]
    return int(not all(error < tolerance for error, tolerance in errors))


def make_model(model: str, folder: str) -> None:
    config = MODELS[model]
    torch.manual_seed(0)
    cls = AutoModelForSeq2SeqLM if model == "T5" else AutoModelForCausalLM
    made = cls.from_config(config)
    for name, param in made.named_parameters():
        if name.endswith("bias"):  # which a config makes zero
            torch.nn.init.normal_(param, std=0.1)
    made.save_pretrained(folder)


def summary(ranks: list[dict[str, Any]], methods: list[str]) -> list[dict[str, Any]]:
    """A row for each method that the model has, with the largest difference of any rank."""
    rows = []
    for method in methods:
        seen = [found[method] for found in ranks]
        if seen[0] is None:
            continue
        row = {"method": method, **seen[0]}
        row |= {name: max(each[name] for each in seen) for name in COLUMNS if name in row}
        rows.append(row)
    return rows


def page(result: dict[str, Any]) -> str:
    """The result in Markdown: a row for each method and model, with the numbers of ranks side by side."""
    sizes = list(dict.fromkeys(row["ranks"] for row in result["rows"]))
    head = ("method", "model", "loss", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    refusals: dict[str, str] = {}
    found = {(row["method"], row["model"], row["ranks"]): row for row in result["rows"]}
    for method, model in dict.fromkeys((row["method"], row["model"]) for row in result["rows"]):
        rows = [found[method, model, size] for size in sizes if (method, model, size) in found]
        if "refused" in rows[0]:
            refusals.setdefault(method, rows[0]["refused"])
            continue
        cells = [" / ".join(f"{row[name]:.0e}" if name in row else "-" for row in rows) for name in COLUMNS]
        first, last = rows[0]["fell"]
        lines.append(f"| {method} | {model} | {first:.3f} → {last:.3f} | {' | '.join(cells)} |")
    refused = [f"- {method}: {text}" for method, text in refusals.items()]
    return (
        f"`{result['command']}`\n\nSmall random models with 9 query heads (3 KV heads but T5) and, of mixtures, 5 "
        f"experts, fp32, {STEPS} steps of {SAMPLES} x {LENGTH} tokens with AdamW; on {' / '.join(map(str, sizes))} "
        "ranks. Differences from one process: of any step's loss, relative; of the adapter's weights after the last "
        "step; of the logits of one process that loads the saved adapter, and of the merged model, from those of the "
        f"ranks. {shown_machine(result['machine'])}; {result['machine']['date']}.\n\n"
        + "\n".join(lines)
        + ("\n\nRefused:\n\n" + "\n".join(refused) if refused else "")
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
