"""The layout of a custom `partition_tensor`, traced by a call without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...errors import error_text
from ...ranks.group import TP_AXIS
from ...slices.layout import Layout, Range, Split
from ...slices.stored import Stored
from ...torch_api import make_wrapper_subclass, to_copy, tree_map_only


def traced_layout(partition: Callable[..., Any], param_type: str, shape: Sequence[int], size: int) -> Layout | None:
    """Trace the indices that a `partition_tensor` takes on every rank, with a tensor without data.

    Raises ValueError if it returns anything but a slice along one dim, or if the ranks' slices are not a valid `Split`:
    every index held, and any two ranges disjoint or equal.
    """
    empty = torch.empty(tuple(shape), device="meta")
    cuts: list[tuple[int | None, tuple[Range, ...]]] = []
    for rank in range(size):
        outline = _Outline(Stored(None, offset=0, shape=shape, dtype=empty.dtype))  # type: ignore[arg-type]
        try:
            part = partition(outline, empty, param_type, empty.dtype, True, rank, outline_mesh(rank, size))
        except Exception as error:
            raise ValueError(f"its partition_tensor fails without data: {error_text(error)}") from error
        part = part._local_tensor if isinstance(part, DTensor) else part
        if not isinstance(part, _Outline):
            raise ValueError(
                "its partition_tensor has to return a slice of `param` (param[a:b], param[..., a:b], get_tensor_shard, "
                "get_packed_weights), plain or in a DTensor or a parameter, not values computed from it"
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


@cache
def outline_mesh(rank: int, size: int) -> Any:
    """The mesh of `rank`, without process groups; under older torch an object with `size` alone."""
    try:
        return DeviceMesh("meta", torch.arange(size), mesh_dim_names=(TP_AXIS,), _init_backend=False, _rank=rank)
    except TypeError:
        return SimpleNamespace(size=lambda dim=None: size)


class _Outline(Tensor):
    """A tensor without data that records slices of itself."""

    stored: Stored

    @staticmethod
    def __new__(cls, stored: Stored) -> _Outline:
        meta = torch.device("meta")
        outline: _Outline = make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=meta)
        outline.stored = stored
        return outline

    def __init__(self, stored: Stored) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        select = _SELECTIONS.get(func.overloadpacket)
        if select is not None:
            return select(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(
            cls, lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _slice(given: _Outline, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    if step != 1:
        return torch.empty(given.shape, device="meta")[(slice(None),) * (dim % given.ndim) + (slice(start, end, step),)]
    first, last, _ = slice(start, end).indices(given.shape[dim])
    return _Outline(given.stored.select(dim % given.ndim, [(first, max(first, last))]))


def _pieces(given: _Outline, lengths: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    whole = given.shape[dim]
    if isinstance(lengths, int):
        lengths = [min(lengths, whole - start) for start in range(0, whole, lengths)] if whole else [0]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return [_slice(given, dim, end - length, end) for length, end in zip(lengths, ends, strict=True)]


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate selections of one tensor; a plain tensor for anything else."""
    joined = parts[0].stored if isinstance(parts[0], _Outline) else None
    for part in parts[1:]:
        other = part.stored if isinstance(part, _Outline) else None
        joined = joined.extended(other, dim % part.ndim) if joined is not None and other is not None else None
    if joined is not None:
        return _Outline(joined)
    return torch.cat([torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts], dim)


def _same(given: _Outline, *args: Any, **kwargs: Any) -> _Outline:
    """The same indices; the load determines dtype, device and strides."""
    return _Outline(given.stored)


def _view(given: _Outline, shape: Sequence[int]) -> Tensor:
    """A view of the same shape, which DTensor makes; a plain tensor for another shape, where dims may differ."""
    return _same(given) if tuple(shape) == given.shape else torch.empty(given.shape, device="meta").view(shape)


_ATEN = torch.ops.aten
_SELECTIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.slice: _slice,
    _ATEN.split: _pieces,
    _ATEN.split_with_sizes: _pieces,
    _ATEN.cat: _join,
    _ATEN.view: _view,
    **dict.fromkeys((_ATEN.detach, _ATEN.alias, _ATEN.clone, to_copy), _same),
}
"""Operations that return one or several selections."""
