"""The layout that a strategy's own `partition_tensor` cuts, found without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...slices.layout import Layout, Range, Split
from ...slices.lazy import LazyTensor
from ...slices.stored import Stored


def traced_layout(partition: Callable[..., Any], param_type: str, shape: Sequence[int], size: int) -> Layout | None:
    """The indices that a `partition_tensor` takes on every rank, found by giving it a tensor without data.

    Raises ValueError where it returns anything but a slice along one dim, or where the ranks' slices are not a cut of
    the whole: every index held, and any two ranks' ranges disjoint or equal.
    """
    empty = torch.empty(tuple(shape), device="meta")
    mesh = SimpleNamespace(size=lambda dim=None: size)  # of a DeviceMesh, as much as there is before there are ranks
    cuts: list[tuple[int | None, tuple[Range, ...]]] = []
    for rank in range(size):
        outline = _Outline(Stored(None, offset=0, shape=shape, dtype=empty.dtype))  # type: ignore[arg-type]
        try:
            part = partition(outline, empty, param_type, empty.dtype, True, rank, mesh)
        except Exception as error:
            raise ValueError(f"its partition_tensor fails on a lazy tensor: {type(error).__name__}: {error}") from error
        if not isinstance(part, _Outline):
            raise ValueError(
                "its partition_tensor has to return a slice of `param` (param[a:b], param[..., a:b], get_tensor_shard, "
                "get_packed_weights), not values computed from it"
            )
        selection = part.stored.selection
        dims = [dim for dim, held in enumerate(selection) if held != ((0, shape[dim]),)]
        if len(dims) > 1:
            raise ValueError(f"its partition_tensor cuts dims {dims}; a shard is cut along one")
        cuts.append((dims[0], selection[dims[0]]) if dims else (None, ()))
    cut_dims = {dim for dim, _ in cuts if dim is not None}
    if not cut_dims:
        return None
    if len(cut_dims) > 1:
        raise ValueError(f"its partition_tensor cuts dim {min(cut_dims)} on one rank, dim {max(cut_dims)} on another")
    dim = cut_dims.pop()
    whole: tuple[Range, ...] = ((0, shape[dim]),)
    split = Split(shape[dim], tuple(whole if cut is None else held for cut, held in cuts))
    if not split.is_cut:
        raise ValueError(
            f"its partition_tensor leaves out indices of dim {dim}, or cuts it into ranges that overlap: {split.ranges}"
        )
    return Layout(dim, split)


class _Outline(LazyTensor):
    """A lazy tensor without data, which remembers what was selected of it."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self.shape, self.dtype = stored, stored.shape, stored.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> _Outline:
        """The outline of the selection."""
        return _Outline(self.stored.select(dim, ranges))

    def materialize(self) -> Tensor:
        """A meta tensor of its shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")
