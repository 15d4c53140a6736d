"""The inverse of a strategy's slicing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_transformers.strategies import TensorParallelLayer


def undo_partition(
    layer: TensorParallelLayer, shards: Sequence[Tensor], param_type: str, shape: Sequence[int]
) -> Tensor:
    """The whole parameter of `shape`, from the shards that `layer` cuts it into."""
    layout = layer.layout(param_type, shape, len(shards))
    if layout is None:
        return shards[0]
    whole = torch.empty(tuple(shape), dtype=shards[0].dtype)
    for piece in layout.split.pieces:
        part = shards[piece.rank].narrow(layout.dim, piece.local, piece.length)
        whole.narrow(layout.dim, piece.start, piece.length).copy_(part)
    return whole
