"""Norms: tests for any norm, for one that computes token by token, and for an RMS norm; the epsilon of a norm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn


def is_norm(module: nn.Module) -> bool:
    """True for a norm of any kind, known by its class's name; computing it twice gives the same."""
    return "Norm" in type(module).__name__


def is_norm_of_tokens(module: nn.Module) -> bool:
    """True for a norm that computes token by token, so that a part of the sequence will do: it has only vectors."""
    return is_norm(module) and all(param.ndim == 1 for param in module.parameters())


def is_norm_of_one_tensor(module: nn.Module) -> bool:
    """True for a norm of one tensor, scaled by its mean and by a weight of at most a number a feature of a head."""
    weight = module._parameters.get("weight")
    return (
        is_norm(module)
        and weight is not None
        and weight.ndim <= 2
        and not list(module.children())
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def is_rms_norm(module: nn.Module, shape: Sequence[int]) -> bool:
    """True if a module with a weight of `shape` is an RMS norm: an epsilon, no bias, no mean but that of squares."""
    has_bias = "bias" in dict(module.named_parameters())
    return bool(shape) and epsilon(module) is not None and not isinstance(module, nn.LayerNorm) and not has_bias


def epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by the names that transformers and torch use; None where it has none."""
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if value is not None), None)


def is_of_norm_or_bias(name: str, ndim: int) -> bool:
    """True if a parameter of that name is a norm's or a bias: a new model has equal values in it."""
    return ndim < 2 or "norm" in name or "bias" in name.rpartition(".")[2]
