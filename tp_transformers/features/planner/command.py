"""`tp-transformers plan MODEL`: each rank's shard of a model, from config and headers alone."""

from __future__ import annotations

import argparse
import json
import re
import sys
from fractions import Fraction
from functools import partial
from typing import Any

from ...errors import UsageError
from ..command_line.arguments import add_dtype, add_plan, add_shares, count_ranks, parse_dtype, parse_shares

SUMMARY = "say what every rank would hold of a model, and whether it fits, from config and headers alone"
EXAMPLE = "tp-transformers plan meta-llama/Llama-3.1-70B --tp-size 8 --batch 8 --context 8192 --gpu-memory 24GB"

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
LEAST = 1000
"""Minimum bytes of a rank's memory; for fewer, the unit is probably missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; a config alone will do")
    parser.add_argument("--tp-size", type=int, metavar="N", help="number of ranks, unless --shares or --memory say it")
    add_shares(parser)
    add_plan(parser)
    add_dtype(parser)
    parser.add_argument("--packed", action="store_true", help="quantised weights stay packed (tp_dequantize=False)")
    parser.add_argument("--invariant", action="store_true", help="as with tp_invariant: the bits of one process")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the KV cache (default 1)")
    parser.add_argument("--context", type=int, help="tokens of each (default 4096 at most; 0: no KV cache)")
    parser.add_argument("--optimizer", help="count the memory of training with adamw, adam, momentum or sgd, too")
    parser.add_argument(
        *("--memory", "--gpu-memory"),
        metavar="BYTES",
        help="memory of every rank, 24GB (10^9 bytes) or 80GiB (2^30); or of each, 48GB,24GB,24GB: finds their shares",
    )
    parser.add_argument("--revision", help="of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--allow-replicated", action="store_true", help="as in from_pretrained")
    parser.add_argument("--png", metavar="FILE", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if the largest rank does not fit into the memory, else 0."""
    from .as_json import as_json
    from .dry_load import survey
    from .fit import fit_shares
    from .memory import OPTIMIZERS, default_context, plan_memory
    from .report import as_text
    from .room import judge

    memory = [_bytes(text) for text in arguments.memory.split(",")] if arguments.memory is not None else []
    shares = parse_shares(arguments.shares)
    if arguments.png is not None:
        fix = "Leave it out; --json has the shape of each weight on each rank, to draw from."
        raise UsageError("--png", got=repr(arguments.png), expected="no picture", fix=fix)
    _check("--batch", arguments.batch, 1)
    _check("--context", arguments.context or 0, 0)
    if arguments.optimizer not in (None, *OPTIMIZERS):
        fix, expected = "Give one of them.", ", ".join(OPTIMIZERS)
        raise UsageError("--optimizer", got=repr(arguments.optimizer), expected=expected, fix=fix)
    where = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    asked = {"tp_plan": arguments.plan, "dtype": parse_dtype(arguments.dtype), "invariant": arguments.invariant}
    take = partial(survey, arguments.model, **asked, **where)
    surveyed = take(packed=arguments.packed)
    surveyed = surveyed if shares is None else surveyed.with_shares(shares)
    listed, counted = len(memory) if len(memory) > 1 else None, len(shares) if shares is not None else None
    ranks = count_ranks({"--tp-size": arguments.tp_size, "--shares": counted, "--memory": listed})
    memory = memory * ranks if len(memory) == 1 else memory
    _check("--tp-size", ranks, 1)
    options: dict[str, Any] = {
        "batch": arguments.batch,
        "context": default_context(surveyed.model) if arguments.context is None else arguments.context,
        "optimizer": arguments.optimizer,
        "allow_replicated": arguments.allow_replicated,
    }
    fits_shares = shares is None and len(set(memory)) > 1
    planned = fit_shares(surveyed, memory, **options) if fits_shares else plan_memory(surveyed, ranks, **options)
    room = None
    if memory:
        stays = not arguments.packed and surveyed.is_quantized
        room = judge(planned, memory, partial(take, packed=True) if stays else None, is_fitted=fits_shares)
    print(json.dumps(as_json(planned, room)) if arguments.json else as_text(planned, room))
    return 0 if room is None or room.fits else 1


def _check(argument: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(argument, got=str(value), expected=f"{least} or more", fix="Give such a number.")


def _bytes(text: str) -> int:
    """Parse a number of bytes. Raises UsageError if `text` is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    known = match is not None and match[2] in UNITS
    count = min(int(Fraction(match[1]) * UNITS[match[2]]), sys.maxsize) if match is not None and known else 0
    if count < LEAST:
        fix = "Say it as 24GB (10^9 bytes) or 24GiB (2^30), of three ranks as 24GB,24GB,24GB."
        raise UsageError("--memory", got=repr(text), expected="a number of bytes with its unit", fix=fix)
    return count
