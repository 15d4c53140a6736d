"""transformers' continuous batching with a cache of this rank's heads."""

from __future__ import annotations

import inspect
import sys
from contextvars import ContextVar
from typing import Any

from ..errors import UnsupportedError
from ..marks import untyped
from ..patches import Patch, Undo, replace, replace_all
from ..ranks.group import GROUP
from ..strategies import LocalConfig

_MODULE = "transformers.generation.continuous_batching.continuous_api"

_kv_heads: ContextVar[int | None] = ContextVar("tp_transformers_kv_heads", default=None)
"""Number of KV heads of this rank, while the cache of a tensor-parallel model is created."""


def _create_batch_processor(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ContinuousBatchingManager._create_batch_processor`, which creates the cache."""
    if GROUP.find(self.model) is None:
        return original(self, *args, **kwargs)
    token = _kv_heads.set(_own_kv_heads(self.model))
    try:
        return original(self, *args, **kwargs)
    finally:
        _kv_heads.reset(token)


def _make_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`PagedAttentionCache.__init__` with this rank's KV heads in its config; it does not divide them again."""
    heads = _kv_heads.get()
    if heads is not None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        arguments = bound.arguments
        arguments["config"] = LocalConfig(arguments["config"], num_key_value_heads=heads)
        if "distributed_helper" in arguments:
            arguments["distributed_helper"] = LocalConfig(
                arguments["distributed_helper"], are_kv_heads_tp_ed=lambda: False
            )
        for name, default in (("tp_plan", {}), ("tp_size", None)):  # arguments of older releases
            if name in arguments:
                arguments[name] = default
        args, kwargs = bound.args[1:], bound.kwargs
    original(self, *args, **kwargs)


def _own_kv_heads(model: Any) -> int | None:
    """KV heads of this rank, the same in every layer; None if attention is not sharded.

    Raises UnsupportedError if layers have different numbers of them.
    """
    rank = model.tp_group.rank
    counts = {heads.kv.widths[rank] for heads in model.tp_resolution.attention.values()}
    if len(counts) > 1:
        raise UnsupportedError(
            "continuous batching",
            got=f"layers with {', '.join(map(str, sorted(counts)))} KV heads on rank {rank}",
            expected="layers that have as many",
            fix="Call generate.",
        )
    return counts.pop() if counts else None


def _install() -> Undo:
    module: Any = sys.modules[_MODULE]
    return replace_all(
        [
            (module.ContinuousBatchingManager, "_create_batch_processor", _create_batch_processor),
            (module.PagedAttentionCache, "__init__", _make_cache),
        ]
    )


def _reject_managers() -> Undo:
    """Reject a tensor-parallel model in `ContinuousBatchingManager`: its cache would have all heads."""
    manager = untyped(sys.modules[_MODULE]).ContinuousBatchingManager
    return replace(manager, "__init__", OWN_CACHE.refusing(lambda _, model, *__, **___: GROUP.find(model) is not None))


OWN_CACHE = Patch("transformers", "continuous batching", _install, module=_MODULE, without=_reject_managers)
"""Gives the cache of continuous batching this rank's KV heads."""
