"""Predicted speeds beside measured ones, on CPU ranks: `python -m benchmarks speeds`.

Each checkpoint of random weights (2,048 features, 6 layers) is decoded and prefilled by 1 and 2 ranks, which share the
cores of the machine; then `tp-transformers plan --device cpu` measures the machine, and predicts the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tp_transformers

from . import processes
from .bench_quantised import after_barrier, decode, prefill
from .checkpoints import write
from .forward import config_of
from .ranks import in_turn, joined
from .report import page, slowest, spread

MODELS = ("llama", "mixtral", "phi3")
PROMPT = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}
CONTEXT = 68
"""Tokens in the cache of a decode step: the mean of those that are timed."""


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Add the options, and read them."""
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)")
    add("--rounds", type=int, default=3, help="how often each is timed (default: 3)")
    add("--timeout", type=float, default=200, help="seconds that one checkpoint may take on one number of ranks")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure all models. Raises ProcessError if a process fails or takes too long."""
    result |= {"rounds": arguments.rounds, "rows": []}
    for model in arguments.models:
        for dtype in arguments.dtypes:
            with tempfile.TemporaryDirectory() as scratch:
                form = "int4" if dtype == "int4" else ""
                write(Path(scratch, "model"), config_of(model, "real"), form, DTYPES[dtype])
                job = {"folder": f"{scratch}/model", "dtype": dtype, "rounds": arguments.rounds}
                timed = {
                    size: processes.run_ranks(f"{__name__}:on_rank", {**job, "size": size}, timeout=arguments.timeout)
                    for size in arguments.ranks
                }
                predicted = _plan(f"{scratch}/model", max(arguments.ranks), dtype, arguments.timeout)
            for size, ranks in timed.items():
                seconds = slowest(ranks)
                row = {"model": model, "dtype": dtype, "ranks": size, "predicted": predicted[size]}
                row["measured"] = {name: spread(values) for name, values in seconds.items()}
                result["rows"].append(row)
                print(_line(row), flush=True)


@torch.no_grad()
def on_rank(folder: str, dtype: str, rounds: int, size: int, rank: int, store: str) -> dict[str, list[float]]:
    """Seconds of a decode step and of a prompt in each round."""
    with joined(store, rank, size), tp_transformers.enable():
        options = {"dtype": DTYPES[dtype], "tp_dequantize": dtype != "int4", "tp_map": False}
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", **options).eval()
        scenarios = {"decode": decode, "prefill": partial(prefill, length=PROMPT)}
        calls = {name: partial(after_barrier, scenario, model) for name, scenario in scenarios.items()}
        in_turn(calls, 1)  # warms up
        return in_turn(calls, rounds)


def _plan(folder: str, size: int, dtype: str, timeout: float) -> dict[int, Any]:
    """Number of ranks -> the predicted speeds. Raises OSError if the command fails."""
    command = [sys.executable, "-m", "tp_transformers", "plan", folder, "--tp-size", str(size), "--device", "cpu"]
    command += ["--context", str(CONTEXT), "--json", *["--packed"] * (dtype == "int4")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if found.returncode:
        raise OSError(found.stderr)
    return {row["ranks"]: row for row in json.loads(found.stdout)["speeds"]}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of all rows; the machine and versions are below it."""
    return page(
        result,
        ["model", "dtype", "ranks", "decode: predicted, measured, ratio", "bound by", "prompt: the same"],
        map(_line, result["rows"]),
        f"tokens a second, the slowest rank; measured: the median of {result['rounds']} rounds (min to max); decode "
        f"after 64 tokens, prompts of {PROMPT}",
    )


def _line(row: dict[str, Any]) -> str:
    cells = []
    for kind, tokens in (("decode", 1), ("prefill", PROMPT)):
        at = row["measured"][kind]
        said, low, middle, high = row["predicted"][kind], *(tokens / at[name] for name in ("max", "median", "min"))
        speed = said["tokens_per_second"]
        cells += [f"{speed:.1f}, {middle:.1f} ({low:.1f} to {high:.1f}), {speed / middle:.2f}", said["bound"]]
    return f"| {row['model']} | {row['dtype']} | {row['ranks']} | {' | '.join(cells[:3])} |"
