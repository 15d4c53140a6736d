"""Report of `plan` as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .fit import Room
from .memory import MemoryPlan, Parameter, draft_bytes
from .report import dtype_name
from .speed import Speed, speeds_as_json


def as_json(planned: MemoryPlan, room: Room | None, speeds: Sequence[Speed] = ()) -> dict[str, Any]:
    """The complete report; `version` changes when a key is removed or changes its meaning."""
    survey, stock = planned.survey, planned.survey.stock
    return {
        "version": 1,
        "model": survey.name,
        "class": type(survey.model).__name__,
        "model_type": survey.model.config.model_type,
        "dtype": dtype_name(survey.model.dtype),
        "plan": survey.plan.source,
        "tp_size": planned.size,
        "shares": survey.plan.shares,
        "optimizer": planned.optimizer,
        "checkpoint": stock
        and {
            "files": stock.files,
            "bytes": stock.nbytes,
            "bytes_read": stock.bytes_read,
            "missing": list(stock.missing),
            "unexpected": list(stock.unexpected),
            "tied_but_both_stored": [list(pair) for pair in stock.twice],
            "read_whole": list(stock.read_in_full),
        },
        "parameters": [_parameter(parameter, planned.size) for parameter in planned.parameters],
        "attention": [
            {
                "name": heads.name,
                "query_heads": heads.unsharded[0],
                "kv_heads": heads.unsharded[1],
                "local_query_heads": [query for query, _ in heads.ranks],
                "local_kv_heads": [kv for _, kv in heads.ranks],
            }
            for heads in planned.heads
        ],
        "kv_cache": {
            "batch": planned.batch,
            "context": planned.context,
            "dtype": dtype_name(survey.model.dtype),
            "layers": [
                {"attention": cached.name, "tokens": cached.tokens, "bytes": cached.nbytes} for cached in planned.cached
            ],
            "states": [{"mixer": states.name, "bytes": states.nbytes} for states in planned.states],
        },
        "ranks": [
            {
                "rank": rank,
                "parameter_bytes": planned.parameter_bytes[rank],
                "buffer_bytes": planned.buffer_bytes,
                "kv_cache_bytes": planned.cache_bytes[rank],
                "training_bytes": planned.training_bytes[rank],
                "total_bytes": planned.total_bytes[rank],
            }
            for rank in range(planned.size)
        ],
        "mtp_layers_bytes": draft_bytes(planned),
        "notes": list(planned.notes),
        "gpu_memory": room.memory[0] if room is not None and room.is_even else None,
        "memory": room and room.memory,
        "fits": room and room.fits,
        "longest_context": room and room.context,
        "remedies": room and room.remedies,
        "smallest_tp_size": room and room.smallest,
        "speeds": speeds_as_json(speeds),
    }


def _parameter(parameter: Parameter, size: int) -> dict[str, Any]:
    layout = parameter.layout
    return {
        "name": parameter.name,
        "tied": list(parameter.tied),
        "shape": list(parameter.shape),
        "dtype": dtype_name(parameter.dtype),
        "strategy": parameter.strategy,
        "whole_because": parameter.replicated_because,
        "dim": layout and layout.dim,
        "ranges": layout and layout.split.ranges,
        "local_shapes": [parameter.local_shape(rank) for rank in range(size)],
        "bytes": parameter.local_bytes(size),
    }
