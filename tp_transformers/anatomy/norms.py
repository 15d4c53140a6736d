"""Norms: predicates for any norm, token-wise norms and RMS norms; the epsilon of a norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def is_norm(module: nn.Module) -> bool:
    """True for a norm of any kind, recognised by its class name. Norms are deterministic, so they may be recomputed."""
    return "Norm" in type(module).__name__


def is_rms_norm(module: nn.Module, shape: Sequence[int]) -> bool:
    """True if a module with a weight of `shape` is an RMS norm: it has an epsilon, no bias, and is no LayerNorm."""
    has_bias = "bias" in dict(module.named_parameters())
    return bool(shape) and epsilon(module) is not None and not isinstance(module, nn.LayerNorm) and not has_bias


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by the names in transformers and torch; None without one."""
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if value is not None), None)
