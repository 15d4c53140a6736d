"""Slices of a parameter: the shard of one rank, and the layout that a call of a custom `partition_tensor` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...errors import error_text
from ...ranks.group import TP_AXIS
from ...slices.layout import Layout, Ranks, Split, chunked, packed
from ...slices.lazy import LazyTensor, Resident
from ...slices.stored import Stored
from ...torch_api import make_wrapper_subclass, to_copy, tree_map_only

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
    dim, ranks = dim % empty_param.ndim, Ranks(device_mesh.size())
    split = packed([ranks.split(part) for part in part_lengths(empty_param.shape[dim], parts)])
    return take(param, Layout(dim, split), rank)


def part_lengths(length: int, parts: int | Sequence[int | str] | None) -> list[int]:
    """Lengths of the `parts` of `length` features; all features are one part if `parts` is None.

    Raises ValueError if the features are not the sum of the parts.
    """
    if isinstance(parts, int):
        if parts < 1 or length % parts:
            raise ValueError(f"{length} features are not {parts} equal parts")
        return [length // parts] * parts
    lengths = [length] if parts is None else [part for part in parts if isinstance(part, int) and part > 0]
    if not lengths or len(lengths) < len(parts or ()):
        raise ValueError(f"parts {list(parts or ())} are not lengths, and no attention gives their heads")
    if sum(lengths) != length:
        raise ValueError(f"it has length {length}, its parts add up to {sum(lengths)}")
    return lengths


def own_rows(ids: Tensor, split: Split, rank: int) -> tuple[Tensor, Tensor]:
    """Local row indices of `ids`, and a mask of ids of other ranks' rows: these get row 0, and their output is zeroed.

    Ids outside of the vocabulary stay out of range, so that the look-up fails as it does in one process.
    """
    start, stop = split.ranges[rank][0]
    sides = [(ids >= low) & (ids < high) for low, high in ((0, start), (stop, split.length)) if low < high]
    outside = reduce(or_, sides) if sides else torch.zeros_like(ids, dtype=torch.bool)
    return (ids - start).masked_fill(outside, 0), outside


def traced_layout(partition: Callable[..., Any], param_type: str, shape: Sequence[int], size: int) -> Layout | None:
    """Trace the indices that a `partition_tensor` takes on every rank, with a tensor without data.

    Raises ValueError if it returns anything but a slice along one dim, or if the ranks' slices are not a valid `Split`:
    every index held, and any two ranges disjoint or equal.
    """
    empty = torch.empty(tuple(shape), device="meta")
    selections = []
    for rank in range(size):
        param = _traced(Stored(None, offset=0, shape=shape, dtype=empty.dtype))  # type: ignore[arg-type]
        try:
            shard = partition(param, empty, param_type, empty.dtype, True, rank, meta_mesh(rank, size))
        except Exception as error:
            raise ValueError(f"its partition_tensor fails without data: {error_text(error)}") from error
        shard = shard._local_tensor if isinstance(shard, DTensor) else shard
        if not isinstance(shard, _Traced):
            raise ValueError(
                "its partition_tensor has to return a slice of `param` (param[a:b], param[..., a:b], get_tensor_shard, "
                "get_packed_weights), plain or in a DTensor or a parameter, not values computed from it"
            )
        selections.append(shard.stored.selection)
    dims = [dim for dim, length in enumerate(shape) if any(held[dim] != ((0, length),) for held in selections)]
    if not dims:
        return None
    if len(dims) > 1:
        raise ValueError(f"its partition_tensor splits dims {dims}; a parameter is split along one dim on all ranks")
    (dim,) = dims
    split = Split(shape[dim], tuple(held[dim] for held in selections))
    if not split.is_complete:
        raise ValueError(
            f"its partition_tensor leaves out indices of dim {dim}, or splits it into ranges that overlap: "
            f"{split.ranges}"
        )
    return Layout(dim, split)


@cache
def meta_mesh(rank: int, size: int) -> Any:
    """The mesh of `rank`, without process groups; under older torch an object with `size` alone."""
    try:
        return DeviceMesh("meta", torch.arange(size), mesh_dim_names=(TP_AXIS,), _init_backend=False, _rank=rank)
    except TypeError:
        return SimpleNamespace(size=lambda dim=None: size)


class _Traced(Tensor):
    """A tensor without data that records slices of itself."""

    stored: Stored

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        select = _SELECTIONS.get(func.overloadpacket)
        if select is not None:
            return select(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(
            cls, lambda traced: torch.empty(traced.shape, dtype=traced.dtype, device="meta"), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _traced(stored: Stored) -> _Traced:
    traced: _Traced = make_wrapper_subclass(_Traced, stored.shape, dtype=stored.dtype, device=torch.device("meta"))
    traced.stored = stored
    return traced


def _slice(x: _Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    if step != 1:
        return torch.empty(x.shape, device="meta")[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _traced(x.stored.select(dim % x.ndim, [(first, max(first, last))]))


def _split(x: _Traced, lengths: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    length = x.shape[dim]
    if isinstance(lengths, int):
        lengths = [min(lengths, length - start) for start in range(0, length, lengths)] if length else [0]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return [_slice(x, dim, end - width, end) for width, end in zip(lengths, ends, strict=True)]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate selections of one tensor; a plain tensor for anything else."""
    joined = tensors[0].stored if isinstance(tensors[0], _Traced) else None
    for tensor in tensors[1:]:
        stored = tensor.stored if isinstance(tensor, _Traced) else None
        joined = joined.extended(stored, dim % tensor.ndim) if joined is not None and stored is not None else None
    if joined is not None:
        return _traced(joined)
    return torch.cat([torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors], dim)


def _same(x: _Traced, *args: Any, **kwargs: Any) -> _Traced:
    """The same indices; the load determines dtype, device and strides."""
    return _traced(x.stored)


def _view(x: _Traced, shape: Sequence[int]) -> Tensor:
    """A view of the same shape, which DTensor makes; a plain tensor for another shape, where dims may differ."""
    return _same(x) if tuple(shape) == x.shape else torch.empty(x.shape, device="meta").view(shape)


_ATEN = torch.ops.aten
_SELECTIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.slice: _slice,
    _ATEN.split: _split,
    _ATEN.split_with_sizes: _split,
    _ATEN.cat: _cat,
    _ATEN.view: _view,
    **dict.fromkeys((_ATEN.detach, _ATEN.alias, _ATEN.clone, to_copy), _same),
}
"""Operations that return one or several selections."""
