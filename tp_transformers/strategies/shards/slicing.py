"""Slices of a parameter: the shard of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...slices.layout import Layout, Ranks, Split, apportion, chunked, packed
from ...slices.lazy import LazyTensor, Resident

T = TypeVar("T", Tensor, LazyTensor)


def take(param: T, layout: Layout | None, rank: int) -> T:
    """The shard of `rank`: a lazy slice of a lazy tensor, a view (one range) or a copy of a tensor."""
    if layout is None:
        return param
    ranges = layout.split.ranges[rank]
    if isinstance(param, LazyTensor):
        return param.select(layout.dim, ranges)
    return Resident(param).select(layout.dim, ranges).tensor


def get_tensor_shard(param: T, empty_param: Tensor, device_mesh: Any, rank: int, dim: int) -> T:
    """The slice of `rank` of a parameter that is sharded along `dim` like DTensor's `Shard(dim)`: by `torch.chunk`.

    Args:
        param: the unsharded parameter; a slice of a lazy tensor is lazy.
        empty_param: a tensor of its shape.
        device_mesh: the 1-D mesh of the `tp` axis.
        rank: this process on the axis.
        dim: the dim to shard; the last ranks hold less, or nothing, if it does not divide by the ranks.
    """
    dim %= empty_param.ndim
    return take(param, Layout(dim, chunked(empty_param.shape[dim], device_mesh.size())), rank)


def get_packed_weights(param: T, empty_param: Tensor, device_mesh: Any, rank: int, dim: int, *, parts: int = 2) -> T:
    """The slice of `rank` of a fused parameter; each of its equal `parts` is sharded along `dim`: `AABB -> [AB, AB]`.

    The other arguments are those of `get_tensor_shard`. Raises ValueError if the length is not `parts` equal parts.
    """
    dim %= empty_param.ndim
    return take(param, Layout(dim, split_of(empty_param.shape[dim], device_mesh.size(), 1, None, parts)), rank)


def split_of(
    length: int,
    ranks: Ranks,
    unit: int,
    split: Split | None,
    parts: int | Sequence[int | str] | None,
    *,
    joins: bool = False,
) -> Split:
    """Split `length` over `ranks` by the heads of `split`, else each of `parts` in blocks of `unit`; see `apportion`.

    Raises ValueError if it is not a number of complete heads or the sum of the parts.
    """
    if split is not None:
        if not split.length or length % split.length:
            raise ValueError(f"its {length} features are not {split.length} complete heads")
        return split.scaled(length // split.length)
    if parts is None:
        return apportion(length, ranks, unit=unit, joins=joins)
    if isinstance(parts, int):
        if parts < 1 or length % parts:
            raise ValueError(f"{length} features are not {parts} equal parts")
        return packed([apportion(length // parts, ranks, unit=unit, joins=joins)] * parts)
    lengths = [part for part in parts if isinstance(part, int) and part > 0]
    if not lengths or len(lengths) < len(parts):
        raise ValueError(f"parts {list(parts)} are not lengths, and no attention gives their heads")
    if sum(lengths) != length:
        raise ValueError(f"it has length {length}, its parts add up to {sum(lengths)}")
    return packed([apportion(part, ranks, unit=unit, joins=joins) for part in lengths])


def own_rows(ids: Tensor, split: Split, rank: int) -> tuple[Tensor, Tensor]:
    """Local row indices of `ids`, and a mask of ids of other ranks' rows: these get row 0, and their output is zeroed.

    Ids outside of the vocabulary stay out of range, so that the look-up fails as it does in one process.
    """
    start, stop = split.ranges[rank][0]
    sides = [(ids >= low) & (ids < high) for low, high in ((0, start), (stop, split.length)) if low < high]
    outside = reduce(or_, sides) if sides else torch.zeros_like(ids, dtype=torch.bool)
    return (ids - start).masked_fill(outside, 0), outside
