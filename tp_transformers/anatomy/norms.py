"""Norms: predicates for any norm, token-wise norms and RMS norms; the epsilon of a norm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn


def is_norm(module: nn.Module) -> bool:
    """True for a norm of any kind, recognised by its class name. Norms are deterministic, so they may be recomputed."""
    return "Norm" in type(module).__name__


def is_norm_of_tokens(module: nn.Module) -> bool:
    """True for a token-wise norm (all parameters are vectors), which can run on a shard of the sequence."""
    return is_norm(module) and all(param.ndim == 1 for param in module.parameters())


def is_norm_of_one_tensor(module: nn.Module) -> bool:
    """True for a norm with one input tensor, no children, and a weight of at most two dims (heads, features)."""
    weight = module._parameters.get("weight")
    return (
        is_norm(module)
        and weight is not None
        and weight.ndim <= 2
        and not list(module.children())
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def is_rms_norm(module: nn.Module, shape: Sequence[int]) -> bool:
    """True if a module with a weight of `shape` is an RMS norm: it has an epsilon, no bias, and is no LayerNorm."""
    has_bias = "bias" in dict(module.named_parameters())
    return bool(shape) and epsilon(module) is not None and not isinstance(module, nn.LayerNorm) and not has_bias


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by the names in transformers and torch; None without one."""
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if value is not None), None)


def is_of_norm_or_bias(name: str, ndim: int) -> bool:
    """True if a parameter of that name is a norm's or a bias: a new model initialises it with a constant."""
    return ndim < 2 or "norm" in name or "bias" in name.rpartition(".")[2]
