"""The documented name of `register` of transformers' `ParallelInterface`: `register_strategy`."""

from __future__ import annotations

from typing import Any

from ...patches import MODELS, Patch, Undo, nothing


def _name_registration() -> Undo:
    interface = type(parallel_styles())
    if hasattr(interface, "register_strategy"):
        return lambda: None
    interface.register_strategy = interface.register
    return lambda: delattr(interface, "register_strategy")


REGISTRATION = Patch("transformers", "register_strategy", _name_registration, without=nothing, module=MODELS)


def parallel_styles() -> Any:
    """transformers' registry of parallel styles, by name."""
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:  # before 5.16
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    return ALL_PARALLEL_STYLES
