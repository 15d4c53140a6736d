"""`tp-transformers plan MODEL --tp-size N`: each rank's shard of a model, from config and headers alone."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from ...errors import UsageError, describe

SUMMARY = "say what every rank would hold of a model, and whether it fits, from config and headers alone"
EXAMPLE = "tp-transformers plan meta-llama/Llama-3.1-70B --tp-size 8 --batch 8 --context 8192 --gpu-memory 24GB"

CONTEXT = 4096
"""Default length of a sequence in tokens, limited by the model."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Short names of dtypes."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
LEAST = 1000
"""Minimum bytes of a rank's memory; for fewer, the unit is probably missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; a config alone will do")
    parser.add_argument("--tp-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--plan", default="auto", metavar="FILE", help="a YAML plan in place of the model's own")
    parser.add_argument("--dtype", default="auto", help='as in from_pretrained: "auto" (default), bf16, fp16, fp32')
    parser.add_argument("--packed", action="store_true", help="quantised weights stay packed (tp_dequantize=False)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in the KV cache (default 1)")
    parser.add_argument("--context", type=int, help=f"tokens of each (default {CONTEXT} at most; 0: no KV cache)")
    parser.add_argument("--gpu-memory", metavar="BYTES", help="memory of a rank: 24GB (10^9 bytes), 80GiB (2^30)")
    parser.add_argument("--revision", help="of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the repository's own")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--allow-replicated", action="store_true", help="as in from_pretrained")
    parser.add_argument("--png", metavar="FILE", help="draw how one layer is cut")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if the largest rank does not fit into the memory, else 0."""
    from .as_json import as_json
    from .dry_load import survey
    from .memory import plan_memory, smallest_size
    from .picture import draw
    from .report import as_text

    _check("--tp-size", arguments.tp_size, 1)
    _check("--batch", arguments.batch, 1)
    _check("--context", arguments.context or 0, 0)
    memory = _bytes(arguments.gpu_memory) if arguments.gpu_memory is not None else None
    surveyed = survey(
        arguments.model,
        tp_plan=arguments.plan,
        dtype=_dtype(arguments.dtype),
        revision=arguments.revision,
        packed=arguments.packed,
        trust_remote_code=arguments.trust_remote_code,
    )
    longest = getattr(surveyed.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or CONTEXT
    context = min(CONTEXT, longest) if arguments.context is None else arguments.context
    allowed = arguments.allow_replicated
    planned = plan_memory(surveyed, arguments.tp_size, batch=arguments.batch, context=context, allow_replicated=allowed)
    smallest = smallest_size(planned, memory) if memory is not None else None
    if arguments.png is not None:
        draw(planned, arguments.png)
    findings = (planned, memory, smallest)
    print(json.dumps(as_json(*findings)) if arguments.json else as_text(*findings))
    return 0 if memory is None or max(planned.total_bytes) <= memory else 1


def _check(argument: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(describe(argument, got=str(value), expected=f"{least} or more", fix="Give such a number."))


def _dtype(text: str) -> Any:
    """Parse a dtype; "auto" is returned as it is. Raises UsageError unless it is a floating-point dtype."""
    import torch

    dtype = getattr(torch, DTYPES.get(text, text), None)
    if text == "auto":
        return text
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise UsageError(describe("--dtype", got=repr(text), expected="auto, bf16, fp16 or fp32", fix="Give one of them."))


def _bytes(text: str) -> int:
    """Parse a number of bytes. Raises UsageError if `text` is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    count = 0 if match is None or match[2] not in UNITS else int(float(match[1]) * UNITS[match[2]])
    if count < LEAST:
        fix = "Say it as 24GB (10^9 bytes) or 24GiB (2^30)."
        raise UsageError(describe("--gpu-memory", got=repr(text), expected="a number of bytes with its unit", fix=fix))
    return count
