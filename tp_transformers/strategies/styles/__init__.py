"""Styles of other libraries, as strategies."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import PlanError
from ...transformers_api import registered_style
from ..base import TensorParallelLayer
from .of_torch import OWN_NAMES, SUPPORTED, TorchStyleParallel
from .of_transformers import TransformersStyleParallel, is_transformers_style, registered_by_user

__all__ = ["as_strategy", "registered_by_user", "style_hint"]


def as_strategy(value: Any) -> Any:
    """A style of torch or of transformers as a strategy; a strategy, or anything else, as it is.

    Raises PlanError for a subclass of our `TensorParallelLayer` that is written as transformers' are.
    """
    if isinstance(value, TensorParallelLayer):
        if hasattr(value, "shard_param"):
            raise PlanError(
                f"strategy {type(value).__name__}",
                got="shard_param, which a tp_transformers.TensorParallelLayer does not have",
                expected="split_dim or partition_tensor",
                fix="Inherit from transformers' TensorParallelLayer, or implement split_dim.",
            )
        return value
    if isinstance(value, ParallelStyle):
        return TorchStyleParallel(value)
    return TransformersStyleParallel(value) if is_transformers_style(value) else value


def style_hint(name: str) -> str:
    """Hint for a name of another library where that of a strategy is expected; "" for any other name."""
    name = name.removesuffix("()")
    if name in {style.__name__ for style in SUPPORTED}:
        own = f", and ours is called {OWN_NAMES[name]!r}" if name in OWN_NAMES else ""
        return f" (torch's style is an object, {name}(...), which a plan in Python can hold{own})"
    if hasattr(registered_style(name), "shard_tensor"):
        return (
            " (it is registered with transformers, in the form of its releases before 5.17; inherit from "
            "tp_transformers.TensorParallelLayer, and register it with tp_transformers.ParallelInterface)"
        )
    return ""
