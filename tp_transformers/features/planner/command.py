"""`tp-transformers plan MODEL`: each rank's shard of a model, from config and headers alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import UsageError
from ..command_line.arguments import add_dtype, add_plan, add_shares, count_ranks, parse_dtype, parse_shares
from .devices import HELP, parse_count, parse_devices

SUMMARY = "say what every rank would hold of a model, whether it fits, and how fast, from config and headers alone"
EXAMPLE = "tp-transformers plan meta-llama/Llama-3.1-70B --tp-size 8 --batch 8 --context 8192 --device H100"


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
    parser.add_argument("--device", metavar="DEVICE,...", help=HELP)
    parser.add_argument("--revision", help="of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--allow-replicated", action="store_true", help="as in from_pretrained")
    parser.add_argument("--png", metavar="FILE", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if the largest rank does not fit into the memory, else 0."""
    from .as_json import as_json
    from .dry_load import survey
    from .fit import fit_shares, judge
    from .memory import OPTIMIZERS, default_context, plan_memory
    from .report import as_text
    from .speed import compare, with_fast_shares

    given = arguments.memory.split(",") if arguments.memory is not None else []
    memory = [parse_count(text, "--memory") for text in given]
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
    asked = {"tp_plan": arguments.plan, "dtype": parse_dtype(arguments.dtype), "where": where}
    # Options of features that may not be there.
    asked |= {"tp_invariant": True} if arguments.invariant else {}
    asked |= {"allow_replicated": True} if arguments.allow_replicated else {}
    take = partial(survey, arguments.model, **asked)
    surveyed = take(packed=arguments.packed)
    surveyed = surveyed if shares is None else surveyed.with_shares(shares)
    devices = parse_devices(arguments.device, is_fp32=surveyed.model.dtype.itemsize > 2)
    listed, each = (len(values) if len(values) > 1 else None for values in (memory, devices))
    counted = len(shares) if shares is not None else None
    ranks = count_ranks({"--tp-size": arguments.tp_size, "--shares": counted, "--memory": listed, "--device": each})
    _check("--tp-size", ranks, 1)
    devices = devices * ranks if len(devices) == 1 else devices
    memory = memory * ranks if len(memory) == 1 else memory or [device.memory for device in devices if device.memory]
    if memory:
        devices = [replace(device, memory=held) for device, held in zip(devices, memory, strict=False)]
    options: dict[str, Any] = {
        "batch": arguments.batch,
        "context": default_context(surveyed.model) if arguments.context is None else arguments.context,
        "optimizer": arguments.optimizer,
    }
    fits_shares = shares is None and len(set(devices or memory)) > 1
    fit = fits_shares and not devices
    planned = fit_shares(surveyed, memory, **options) if fit else plan_memory(surveyed, ranks, **options)
    planned = with_fast_shares(planned, devices) if fits_shares and devices else planned
    room = None
    if memory:
        stays = not arguments.packed and surveyed.is_quantized
        room = judge(planned, memory, partial(take, packed=True) if stays else None, is_fitted=fits_shares)
    speeds = compare(planned, devices) if devices else []
    print(json.dumps(as_json(planned, room, speeds)) if arguments.json else as_text(planned, room, speeds))
    return 0 if room is None or room.fits else 1


def _check(argument: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(argument, got=str(value), expected=f"{least} or more", fix="Give such a number.")
