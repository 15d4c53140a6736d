"""The inverse of a strategy's slicing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_transformers.strategies import TensorParallelLayer


def undo_partition(
    layer: TensorParallelLayer, shards: Sequence[Tensor], param_type: str, shape: Sequence[int]
) -> Tensor:
    """The full parameter of `shape`, from the shards that `layer` splits it into."""
    layout = layer.layout(param_type, shape, len(shards))
    if layout is None:
        return shards[0]
    full = torch.empty(tuple(shape), dtype=shards[0].dtype)
    for entry in layout.split.shard_ranges:
        shard = shards[entry.rank].narrow(layout.dim, entry.local, entry.length)
        full.narrow(layout.dim, entry.start, entry.length).copy_(shard)
    return full
