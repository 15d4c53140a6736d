"""Losses and gradient norms by number of ranks, against one process: `python -m benchmarks.bench_exactness`.

Trains the same model on the same batches with `benchmarks.train_llm`, in one process of plain transformers and on each
number of ranks, in fp32, and compares every step; with `tp_invariant`, too. Each process has one thread. Returns 1 if a
loss or a norm differs by more than TOLERANCE, or at all in an invariant run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tp_transformers.ranks.launch import torchrun

from . import demo, machine
from .corpus import Corpus, read_text
from .curves import machine_line
from .meters import read_log
from .processes import ROOT, ProcessError
from .report import save

RESULTS = Path(__file__).parent / "results"
TEXT = ROOT / "tests" / "data" / "alice.txt"
TOLERANCE = 1e-4
"""Relative; sums of fp32 in another order differ by about 1e-6 after a few steps."""
INVARIANT = ", `tp_invariant=True`"
"""End of the name of an invariant run."""
SIZES = {"steps": 5, "batch": 2, "length": 16, "warmup": 2}


def main() -> int:
    """Train in one process and on ranks; writes `results/exactness-cpu.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_exactness", description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint in fp32 (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="(default: 2 3 4)")
    parser.add_argument("--invariant", type=int, nargs="*", default=[3], help="ranks with tp_invariant (default: 3)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one run may take (default: 1800)")
    arguments = parser.parse_args()
    model = arguments.model or demo.prepare()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        one = train(model, 0, arguments.timeout)
        runs = {str(ranks): train(model, ranks, arguments.timeout) for ranks in arguments.ranks}
        for ranks in arguments.invariant:
            runs[f"{ranks}{INVARIANT}"] = train(model, ranks, arguments.timeout, "--invariant")
    except (ProcessError, subprocess.TimeoutExpired) as error:
        print(f"bench_exactness: {error}", file=sys.stderr)
        return 1
    result = {
        "command": "python -m benchmarks.bench_exactness",
        "machine": machine.facts(),
        "setting": {**SIZES, "model": model.name, "text": TEXT.name},
        "one": one,
        "first_norm_fp64": first_norm(model),
        "ranks": {name: compared(run, one) for name, run in runs.items()},
    }
    save(RESULTS / "exactness-cpu.json", result, page(result))
    print(table(result))
    worst = {name: max(run["loss"], run["norm"]) for name, run in result["ranks"].items()}
    return int(not all(error <= TOLERANCE * (INVARIANT not in name) for name, error in worst.items()))


def train(model: Path, ranks: int, timeout: float, *options: str) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps; 0 ranks are one process of plain transformers.

    Raises ProcessError if the run fails.
    """
    sizes = shlex.split(" ".join(f"--{name} {value}" for name, value in SIZES.items()))
    with tempfile.TemporaryDirectory() as out:
        program = [
            "-m",
            "benchmarks.train_llm",
            "--model",
            str(model),
            "--text",
            str(TEXT),
            "--out",
            out,
            *sizes,
            *options,
        ]
        with Path(out, "output.txt").open("wb") as output:
            if ranks:
                code = torchrun(program, ranks=ranks, timeout=timeout, output=output)
            else:
                command = [sys.executable, *program]
                code = subprocess.run(command, stdout=output, stderr=output, timeout=timeout, check=False).returncode
        if code:
            raise ProcessError(f"{ranks} ranks: exit code {code}\n{Path(out, 'output.txt').read_text()[-6000:]}")
        steps = [line for line in read_log(Path(out, "log.jsonl")) if "step" in line]
    print(f"{ranks or 'no'} ranks: {steps[-1]['loss']:.6f}", file=sys.stderr, flush=True)
    return {"losses": [line["loss"] for line in steps], "norms": [line["norm"] for line in steps]}


def first_norm(model: Path) -> float:
    """Norm in fp64 of the first step's gradients, which one process computes in fp32.

    A sum of 28 million squares in fp32, those of the embedding's gradient, loses digits.
    """
    batch = Corpus(read_text(AutoTokenizer.from_pretrained(model), TEXT), SIZES["length"], 0).batch(0, SIZES["batch"])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    plain(batch, labels=batch, use_cache=False).loss.backward()
    norms = [param.grad.double().norm() for param in plain.parameters() if param.grad is not None]
    return torch.stack(norms).norm().item()


def compared(run: dict[str, list[float]], one: dict[str, list[float]]) -> dict[str, Any]:
    """A run with its largest relative differences from `one`."""
    worst = {
        name: max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(run[key], one[key], strict=True))
        for name, key in (("loss", "losses"), ("norm", "norms"))
    }
    return {**run, **worst}


def table(result: dict[str, Any]) -> str:
    """One row for one process, and one for each number of ranks."""
    first, last = ([values[step] for values in result["one"].values()] for step in (0, -1))
    rows = [
        "| ranks | first loss | last loss | first gradient norm | last gradient norm | losses differ | norms differ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| one process of transformers | {first[0]:.6f} | {last[0]:.6f} | {first[1]:.5f} | {last[1]:.5f} | | |",
    ]
    for ranks, run in result["ranks"].items():
        losses, norms = run["losses"], run["norms"]
        rows.append(
            f"| {ranks} | {losses[0]:.6f} | {losses[-1]:.6f} | {norms[0]:.5f} | {norms[-1]:.5f} "
            f"| {run['loss']:.0g} | {run['norm']:.0g} |"
        )
    rows += ["", f"The first norm of one process, with squares summed in fp64: {result['first_norm_fp64']:.5f}."]
    return "\n".join(rows)


def page(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    setting = result["setting"]
    return (
        f"`{result['command']}`\n\n{setting['model']}, fp32, {setting['steps']} steps of {setting['batch']} x "
        f"{setting['length']} tokens of {setting['text']}, AdamW, gradients clipped to 1. Differences from one process "
        f"are relative, the largest of all steps. {machine_line(result['machine'])}\n\n"
        f"{table(result)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
