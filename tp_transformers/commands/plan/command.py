"""`tp-transformers plan MODEL --tp-size N`: what every rank would hold, from config and headers alone."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import UsageError, describe
from ...plans.catalogue import available_plans
from ...text import size
from .dry_load import Survey, survey
from .memory import MOST_RANKS, Outline, outline, smallest_size
from .picture import draw
from .text import cache_lines, table, tree, whole_lines

SUMMARY = "say what every rank would hold of a model, and whether it fits, from config and headers alone"
EXAMPLE = "tp-transformers plan meta-llama/Llama-3.1-70B --tp-size 8 --batch 8 --context 8192 --gpu-memory 24GB"

CONTEXT = 4096
"""Tokens of a sequence where nobody says, and the model can take as many."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Short names of dtypes."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hub; a config alone will do")
    parser.add_argument("--tp-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--plan", default="auto", metavar="FILE", help="a YAML plan in place of the model's own")
    parser.add_argument("--dtype", default="auto", help='as in from_pretrained: "auto" (default), bf16, fp16, fp32')
    parser.add_argument("--batch", type=int, default=1, help="sequences in the KV cache (default 1)")
    parser.add_argument("--context", type=int, help=f"tokens of each (default {CONTEXT} at most; 0: no KV cache)")
    parser.add_argument("--gpu-memory", metavar="BYTES", help="memory of a rank: 24GB (10^9 bytes), 80GiB (2^30)")
    parser.add_argument("--revision", help="of a model on the Hub")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--png", metavar="FILE", help="draw how one layer is cut")


def run(arguments: argparse.Namespace) -> int:
    """Print the outline; returns 1 where it does not fit into the memory, else 0."""
    _check("--tp-size", arguments.tp_size, 1)
    _check("--batch", arguments.batch, 1)
    _check("--context", arguments.context or 0, 0)
    memory = _bytes(arguments.gpu_memory) if arguments.gpu_memory is not None else None
    found = survey(arguments.model, tp_plan=arguments.plan, dtype=_dtype(arguments.dtype), revision=arguments.revision)
    longest = getattr(found.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or CONTEXT
    context = min(CONTEXT, longest) if arguments.context is None else arguments.context
    cache = {"batch": arguments.batch, "context": context}
    planned = outline(found, arguments.tp_size, **cache)
    fits = memory is None or max(planned.total_bytes) <= memory
    smallest = smallest_size(found, memory, **cache) if memory is not None else None
    if arguments.png is not None:
        draw(planned, arguments.png)
    if arguments.json:
        print(json.dumps(as_json(planned, memory, smallest)))
    else:
        print("\n".join(_report(planned, memory, smallest)))
    return 0 if fits else 1


def as_json(planned: Outline, memory: int | None, smallest: int | None) -> dict[str, Any]:
    """All there is to know; `version` changes where a key changes its meaning, or goes."""
    found, ranks = planned.survey, range(planned.size)
    stock = found.stock
    return {
        "version": 1,
        "model": found.name,
        "class": type(found.model).__name__,
        "model_type": found.model.config.model_type,
        "dtype": _name(found.model.dtype),
        "plan": found.plan.source,
        "tp_size": planned.size,
        "checkpoint": stock
        and {
            "files": stock.files,
            "bytes": stock.nbytes,
            "bytes_read": stock.bytes_read,
            "missing": list(stock.missing),
            "unexpected": list(stock.unexpected),
            "tied_but_both_stored": [list(pair) for pair in stock.twice],
            "read_whole": list(stock.read_whole),
        },
        "parameters": [
            {
                "name": parameter.name,
                "tied": list(parameter.tied),
                "shape": list(parameter.shape),
                "dtype": _name(parameter.dtype),
                "strategy": parameter.strategy,
                "whole_because": parameter.whole_because,
                "dim": None if parameter.layout is None else parameter.layout.dim,
                "ranges": None if parameter.layout is None else parameter.layout.split.ranges,
                "local_shapes": [parameter.local_shape(rank) for rank in ranks],
                "bytes": parameter.local_bytes(planned.size),
            }
            for parameter in planned.parameters
        ],
        "attention": [
            {
                "name": heads.name,
                "query_heads": heads.whole[0],
                "kv_heads": heads.whole[1],
                "local_query_heads": [query for query, _ in heads.ranks],
                "local_kv_heads": [kv for _, kv in heads.ranks],
            }
            for heads in planned.heads
        ],
        "kv_cache": {
            "batch": planned.batch,
            "context": planned.context,
            "dtype": _name(found.model.dtype),
            "layers": [
                {"attention": cached.name, "tokens": cached.tokens, "bytes": cached.nbytes} for cached in planned.cached
            ],
        },
        "ranks": [
            {
                "rank": rank,
                "parameter_bytes": planned.parameter_bytes[rank],
                "buffer_bytes": planned.buffer_bytes,
                "kv_cache_bytes": planned.cache_bytes[rank],
                "total_bytes": planned.total_bytes[rank],
            }
            for rank in ranks
        ],
        "notes": list(planned.notes),
        "gpu_memory": memory,
        "fits": None if memory is None else max(planned.total_bytes) <= memory,
        "smallest_tp_size": smallest,
    }


def _report(planned: Outline, memory: int | None, smallest: int | None) -> Iterator[str]:
    """The lines that a reader sees."""
    found = planned.survey
    bold, faint, plain = ("\033[1m", "\033[2m", "\033[0m") if _in_colour() else ("", "", "")
    what = f"{type(found.model).__name__} ({found.model.config.model_type}) in {_name(found.model.dtype)}"
    yield f"{bold}{found.name}: {what} on {_counted(planned.size, 'rank')}{plain}"
    shipped = found.plan.source in map(str, available_plans().values())
    yield f"plan        {'model_plans/' + os.path.basename(found.plan.source) if shipped else found.plan.source}"
    yield from _checkpoint(found)
    yield from (f"note        {note}" for note in planned.notes)
    yield ""
    lines = tree(planned)
    titles = ("whole", "on every rank" if planned.size > 1 else "on the rank", "strategy")
    label = max(len(line.label) + 2 * line.depth for line in lines)
    first, second = (max(len(titles[column]), *(len(line.row[column]) for line in lines)) for column in (0, 1))
    yield f"{bold}{'':{label}}  {titles[0]:{first}}  {titles[1]:{second}}  {titles[2]}{plain}"
    for line in lines:
        text = f"{'  ' * line.depth + line.label:{label}}  {line.row[0]:{first}}  {line.row[1]:{second}}  {line.row[2]}"
        yield f"{faint}{text.rstrip()}{plain}" if line.is_whole else text.rstrip()
    yield ""
    yield from (f"whole on every rank  {line}" for line in (whole_lines(planned) if planned.size > 1 else ()))
    if planned.cached:
        sequences = f"{_counted(planned.batch, 'sequence')} of {_counted(planned.context, 'token')}"
        yield f"KV cache of {sequences} in {_name(found.model.dtype)}"
        yield from (f"  {line}" for line in cache_lines(planned))
    yield ""
    rows = table(planned)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        text = "  ".join(f"{cell:{'<' if not at else '>'}{widths[at]}}" for at, cell in enumerate(row))
        yield f"{bold}{text}{plain}" if not number else text
    yield "not counted: activations, a long prompt while it is read, and what the GPU's runtime keeps for itself"
    if memory is not None:
        fullest = max(planned.total_bytes)
        verdict = "it fits" if fullest <= memory else "it does not fit"
        yield ""
        share = f"{size(fullest)} of {size(memory)} ({fullest / memory:.0%})"
        yield f"{bold}{verdict}{plain}: the fullest rank holds {share}"
        answer = _counted(smallest, "rank") if smallest else f"none up to {MOST_RANKS} ranks"
        yield f"the smallest number of ranks that fits: {answer}"


def _checkpoint(found: Survey) -> Iterator[str]:
    """Whether the checkpoint has what the model needs."""
    stock = found.stock
    if stock is None:
        yield "checkpoint  none, there is only a config: shapes and dtypes are its own"
        return
    complete = "" if stock.missing else "; it has all that the model needs"
    yield (
        f"checkpoint  {_counted(stock.files, 'file')}, {size(stock.nbytes)}, of which {size(stock.bytes_read)} of "
        f"headers were read{complete}"
    )
    for said, names in (
        ("it lacks, and a load would initialise anew", stock.missing),
        ("it also holds, and a load would leave out", stock.unexpected),
        (
            "it holds both of a tied pair, counted once; a load keeps both if they differ",
            [" = ".join(pair) for pair in stock.twice],
        ),
        ("every rank reads all of these to convert them", stock.read_whole),
    ):
        if names:
            more = f", and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"            {said}: {', '.join(names[:5])}{more}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _check(argument: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(describe(argument, got=str(value), expected=f"{least} or more", fix="Give such a number."))


def _dtype(text: str) -> torch.dtype | str:
    """The dtype that `text` names; "auto" stays. Raises UsageError on anything but a floating-point dtype."""
    dtype = getattr(torch, DTYPES.get(text, text), None)
    if text == "auto":
        return text
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise UsageError(describe("--dtype", got=repr(text), expected="auto, bf16, fp16 or fp32", fix="Give one of them."))


def _bytes(text: str) -> int:
    """The number of bytes that `text` says. Raises UsageError where it says none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in UNITS or not float(found[1]):
        fix = "Say it as 24GB (10^9 bytes) or 24GiB (2^30)."
        raise UsageError(describe("--gpu-memory", got=repr(text), expected="a number of bytes", fix=fix))
    return int(float(found[1]) * UNITS[found[2]])
