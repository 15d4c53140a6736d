"""Arguments of several commands: a plan and strategies of one's own (`--plan`, `--import`), `--shares`, `--dtype`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import PlanError, UsageError, shown

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Short names of dtypes."""
SHARES = "TP_TRANSFORMERS_SHARES"
"""Environment variable with shares for loads that ask for none: `2,1,1`, or the name of a measure."""
MEASURES = ("memory", "speed")
"""Ways to find the shares at the load, in place of numbers."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", default="auto", metavar="YAML", help="a plan of your own (default: auto)")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="run a Python file first that registers strategies of your own; several may be given",
    )


def passed_on(arguments: argparse.Namespace) -> list[str]:
    """The two as arguments for another process, with full paths."""
    files = [str(Path(file).resolve()) for file in arguments.imports]
    plan = str(Path(arguments.plan).resolve()) if Path(arguments.plan).is_file() else arguments.plan
    return ["--plan", plan, *(part for file in files for part in ("--import", file))]


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto", help='as in from_pretrained: "auto" (default), bf16, fp16, fp32')


def parse_dtype(text: str) -> Any:
    """The dtype of torch; "auto" is returned as it is. Raises UsageError unless it is a floating-point dtype."""
    import torch

    dtype = getattr(torch, DTYPES.get(text, text), None)
    if text == "auto":
        return text
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise UsageError("--dtype", got=repr(text), expected="auto, bf16, fp16 or fp32", fix="Give one of them.")


def add_shares(parser: argparse.ArgumentParser, *, measured: bool = False) -> None:
    """Add `--shares`; `measured`: memory and speed are values too, since the command starts ranks."""
    words = ", memory or speed" if measured else ""
    parser.add_argument("--shares", metavar="A,B,...", help=f"the share of each rank, as tp_shares: 2,1,1{words}")


def parse_shares(text: str | None) -> tuple[float, ...] | None:
    """The shares of `text`, numbers; None for None. Raises PlanError for other text, UsageError for a measured one."""
    shares = shares_of(text, subject="--shares") if text is not None else None
    if isinstance(shares, str):
        fix = "Give numbers; `tp-transformers plan MODEL --memory 48GB,24GB` finds some."
        raise UsageError("--shares", got=shares, expected="numbers, since no rank runs here", fix=fix)
    return shares


def is_shares(value: Any) -> bool:
    """True for a positive number for each rank, and for the name of a measure."""
    if not isinstance(value, list | tuple):
        return isinstance(value, str) and value in MEASURES
    numbers = [share for share in value if isinstance(share, int | float) and not isinstance(share, bool)]
    return 0 < len(numbers) == len(value) and all(0 < number <= sys.float_info.max for number in numbers)


def shares_of(text: str, *, subject: str) -> tuple[float, ...] | str:
    """Parse shares from text: `2,1,1`, or the name of a measure. Raises PlanError about `subject` if it is neither."""
    text = text.strip()
    try:
        shares = text if text in MEASURES else tuple(map(_number, text.split(",")))
    except ValueError:
        shares = ()
    if not is_shares(shares):
        expected = " or ".join(["a positive number for each rank", *MEASURES])
        fix = "Give 2,1,1 for three ranks, the first with half of the model."
        raise PlanError(subject, got=shown(text), expected=expected, fix=fix)
    return shares


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def count_ranks(given: Mapping[str, int | None]) -> int:
    """The number of ranks from the arguments that say it, by name; None: not given.

    Raises UsageError if they contradict one another, none is given, or the number is not positive.
    """
    counts = {argument: count for argument, count in given.items() if count is not None}
    if len(set(counts.values())) != 1:
        got = " and ".join(f"{argument} for {count}" for argument, count in counts.items()) or "none"
        fix, subject = f"Give {next(iter(given))}, or --shares with one number for each rank.", "number of ranks"
        raise UsageError(subject, got=got, expected="one number", fix=fix)
    argument, ranks = next(iter(counts.items()))
    if ranks < 1:
        raise UsageError(argument, got=str(ranks), expected="1 or more", fix="Give a number of ranks.")
    return ranks
