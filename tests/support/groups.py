"""The tensor-parallel group of a rank without a model, and the widths of its shards by torch's own split."""

from __future__ import annotations

import torch

from tp_transformers.ranks.mesh import join

__all__ = ["counts", "join"]


def counts(length: int, size: int) -> tuple[int, ...]:
    """Indices of each rank, of `length` that are spread evenly; the first ranks have one more."""
    return tuple(len(part) for part in torch.arange(length).tensor_split(size))
