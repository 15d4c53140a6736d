"""Patch of transformers' ways in which experts get tokens: one that exchanges tokens, imported when a model uses it."""

from __future__ import annotations

from typing import Any

from ...patches import MODELS, Patch, Undo, nothing

EXCHANGE = "tp_transformers"
"""Value of `ep_implementation` for experts that transformers shards and this package exchanges tokens for."""


def _exchange(*args: Any) -> Any:
    from .exchange import ExpertExchange

    return ExpertExchange(*args)


def _add_exchange() -> Undo:
    """Add our exchange of tokens to transformers' implementations of expert parallelism."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # before transformers 5.23
        return lambda: None
    EPImplementationInterface.register(EXCHANGE, _exchange)
    return lambda: EPImplementationInterface._global_mapping.pop(EXCHANGE, None)


EP_IMPLEMENTATION = Patch("transformers", "ep_implementation", _add_exchange, without=nothing, module=MODELS)
