"""Bytes of the ranks of a plan, as fractions of the model."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import nn

from tp_transformers.slices.layout import Layout


def largest_fraction(model: nn.Module, layouts: Mapping[str, Layout | None], size: int) -> float:
    """Bytes on the rank that holds most, as a fraction of the full model; a tied parameter counts once."""
    held = [0] * size
    for name, param in model.named_parameters():
        layout = layouts.get(name)
        for rank in range(size):
            shape = param.shape if layout is None else layout.local_shape(param.shape, rank)
            held[rank] += prod(shape) * param.itemsize
    return max(held) / sum(param.nbytes for param in model.parameters())
