"""Styles of other libraries, as strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import PlanError
from ...transformers_api import parallel_styles
from ..base import TensorParallelLayer
from .of_torch import OWN_NAMES, SUPPORTED, TorchStyleParallel
from .of_transformers import TransformersStyleParallel, is_transformers_style
from .partitioned import PartitionedStyle

__all__ = ["as_strategy", "registered_by_user", "style_hint"]

_UNCALLED = ("shard_tensor", "prepare_module_tp")
"""Methods of strategies for transformers before 5.16, which nothing calls here."""


def as_strategy(value: Any) -> Any:
    """A style of torch or of transformers as a strategy; a strategy, or anything else, as it is.

    Raises PlanError for a strategy with methods that would not be called.
    """
    is_ours = isinstance(value, TensorParallelLayer)
    partitions = not is_ours and not isinstance(value, type) and _is_own(value, "partition_tensor")
    if is_ours or partitions or is_transformers_style(value):
        uncalled = [name for name in _UNCALLED if _is_own(value, name)]
        if is_ours and hasattr(value, "shard_param"):
            uncalled.append("shard_param")
        if uncalled:
            raise PlanError(
                f"strategy {type(value).__name__}",
                got=f"{', '.join(uncalled)}, which nothing calls here",
                expected="split_dim or partition_tensor, before and after",
                fix="Inherit from tp_transformers.strategies.TensorParallelLayer, and implement split_dim or "
                "partition_tensor."
                if "shard_param" not in uncalled
                else "Inherit from transformers' TensorParallelLayer, or implement split_dim.",
            )
    if is_ours:
        return value
    if partitions:
        return PartitionedStyle(value)
    if isinstance(value, ParallelStyle):
        return TorchStyleParallel(value)
    return TransformersStyleParallel(value) if is_transformers_style(value) else value


def registered_by_user(name: str, own: Mapping[str, Any]) -> TensorParallelLayer | None:
    """The strategy that a user registered as `name` with transformers' own interface; None where there is none.

    `own`: our strategies. What transformers registers itself is not taken, other than classes of which there is one of
    ours under the same name.
    """
    styles = parallel_styles()
    style = styles.get(name)
    if isinstance(style, type):
        try:
            style = style()
        except TypeError:  # it takes arguments
            return None
    if _is_theirs(type(style)) and type(style) not in {type(styles.get(each)) for each in own}:
        return None
    strategy = as_strategy(style)
    return strategy if isinstance(strategy, TensorParallelLayer) else None


def style_hint(name: str) -> str:
    """Hint for a name of another library where that of a strategy is expected; "" for any other name."""
    name = name.removesuffix("()")
    if name in {style.__name__ for style in SUPPORTED}:
        own = f", and ours is called {OWN_NAMES[name]!r}" if name in OWN_NAMES else ""
        return f" (torch's style is an object, {name}(...), which a plan in Python can hold{own})"
    style = parallel_styles().get(name)
    if isinstance(style, type):
        return f" (it is registered with transformers as a class; register an object, {style.__name__}(...))"
    if style is not None and _is_theirs(type(style)):
        return (
            " (of transformers' expert parallelism; here 'local' on the experts' parameters keeps experts complete, "
            "and 'moe_tp_experts' on the experts adds up what they return)"
        )
    if style is not None:
        return (
            " (it is registered with transformers, in the form of its releases before 5.16; inherit from "
            "tp_transformers.strategies.TensorParallelLayer, and register it with "
            "tp_transformers.strategies.ParallelInterface)"
        )
    return ""


def _is_theirs(cls: type) -> bool:
    return cls.__module__.startswith("transformers.")


def _is_own(value: Any, name: str) -> bool:
    """True if a method is of a user's class, not of transformers' or of ours."""
    module = getattr(getattr(type(value), name, None), "__module__", None) or "transformers."
    return not module.startswith(("transformers.", "tp_transformers."))
