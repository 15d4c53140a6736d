"""Each rank's share of a model as JSON, and as lines for a reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ...plans.catalogue import available_plans
from ...text import columns, size
from .dry_load import Survey
from .memory import MOST_RANKS, MemoryPlan
from .text import cache_lines, table, tree, whole_lines


def as_json(planned: MemoryPlan, memory: int | None, smallest: int | None) -> dict[str, Any]:
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


def as_text(planned: MemoryPlan, memory: int | None, smallest: int | None) -> str:
    """The report for a reader."""
    return "\n".join(_report(planned, memory, smallest))


def _report(planned: MemoryPlan, memory: int | None, smallest: int | None) -> Iterator[str]:
    found = planned.survey
    what = f"{type(found.model).__name__} ({found.model.config.model_type}) in {_name(found.model.dtype)}"
    yield f"{found.name}: {what} on {_counted(planned.size, 'rank')}"
    shipped = found.plan.source in map(str, available_plans().values())
    yield f"plan        {'model_plans/' + os.path.basename(found.plan.source) if shipped else found.plan.source}"
    yield from _checkpoint(found)
    yield from (f"note        {note}" for note in planned.notes)
    yield ""
    titles = ("", "whole", "on every rank" if planned.size > 1 else "on the rank", "strategy")
    yield from columns([titles, *tree(planned)])
    yield ""
    yield from (f"whole on every rank  {line}" for line in (whole_lines(planned) if planned.size > 1 else ()))
    if planned.cached:
        sequences = f"{_counted(planned.batch, 'sequence')} of {_counted(planned.context, 'token')}"
        yield f"KV cache of {sequences} in {_name(found.model.dtype)}"
        yield from (f"  {line}" for line in cache_lines(planned))
    yield ""
    yield from columns(table(planned), right=True)
    yield "not counted: activations, a long prompt while it is read, and what the GPU's runtime keeps for itself"
    if memory is not None:
        fullest = max(planned.total_bytes)
        verdict = "it fits" if fullest <= memory else "it does not fit"
        yield ""
        yield f"{verdict}: the fullest rank holds {size(fullest)} of {size(memory)} ({fullest / memory:.0%})"
        answer = _counted(smallest, "rank") if smallest else f"none up to {MOST_RANKS} ranks"
        yield f"the smallest number of ranks that fits: {answer}"


def _checkpoint(found: Survey) -> Iterator[str]:
    """Lines about the checkpoint: its size, and the tensors it lacks or has in excess."""
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
