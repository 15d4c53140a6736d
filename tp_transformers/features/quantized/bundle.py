"""Quantised tensors: several stored tensors that encode one tensor and are sliced as one.

    256 columns of int4 in groups of 32    values  (8, 32) int32    8 columns per index
                                           scales  (8, 8)          32 columns per index
    columns [80, 256)                      values[:, 10:32], scales[:, 2:8]

A `Bundle` has the shape of the decoded tensor, and is sliced by its indices. The slice is aligned outwards to the
quantisation groups of all stored tensors, so that a format only decodes complete groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from ...checkpoint.reading.memory import copy
from ...slices.layout import Range, union
from ...slices.lazy import LazyTensor, ReadStep
from ...slices.stored import Selection, compose, lengths

_TILE = 1 << 20


def at_a_time(device: torch.device) -> int:
    """Elements decoded at a time: what a CPU's caches hold; on a GPU most matrices whole.

    A GPU takes longer to start the kernels of a piece of a CPU's size than to compute them.
    """
    return _TILE if device.type == "cpu" else _TILE << 5


@dataclass(frozen=True)
class DimMap:
    """A dim of a stored tensor that follows `dim` of the full tensor: `width` indices for every `unit` of `dim`."""

    dim: int
    unit: int = 1
    width: int = 1

    def stored_length(self, length: int) -> int:
        """Indices of the stored tensor that cover the first `length` indices of the full tensor."""
        return -(-length * self.width // self.unit)


Dims = Sequence[DimMap | int]
"""Dims of a stored tensor; one with a length is read in full, whatever the slice."""


def stored_shape(dims: Dims, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a stored tensor for a tensor of `shape`."""
    return tuple(dim if isinstance(dim, int) else dim.stored_length(shape[dim.dim]) for dim in dims)


@dataclass(frozen=True)
class Component:
    """One of the stored tensors."""

    tensor: LazyTensor
    dims: Dims
    name: str = ""
    """Name in the checkpoint."""


StoredValues = Mapping[str, torch.Tensor]
"""Values of the stored tensors, of complete groups, by name."""

Decode = Callable[[StoredValues, Sequence[int]], torch.Tensor]
"""Decode stored values to a tensor of the given shape. An element depends on its own group only."""


class Bundle(LazyTensor):
    """Stored tensors that `decode` turns into a tensor of `shape` (..., n, m) and `dtype`."""

    def __init__(
        self,
        components: Mapping[str, Component],
        shape: Sequence[int],
        dtype: torch.dtype,
        decode: Decode,
        selection: Selection | None = None,
    ) -> None:
        """Raises ValueError if the shape of a stored tensor does not match its `dims`."""
        for name, component in components.items():
            expected = stored_shape(component.dims, shape)
            if tuple(component.tensor.shape) != expected:
                raise ValueError(f"{name} of shape {tuple(component.tensor.shape)}, not {expected}")
        self.components, self.full_shape, self.decode = components, tuple(shape), decode
        self.selection = selection or tuple(((0, length),) for length in shape)
        self.shape, self.dtype = torch.Size(lengths(self.selection)), dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Bundle:
        selection = list(self.selection)
        selection[dim] = compose(selection[dim], ranges)
        return Bundle(self.components, self.full_shape, self.dtype, self.decode, tuple(selection))

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        """Read the stored tensors into buffers, then decode them into `destination`."""
        units = [1] * len(self.full_shape)
        for component in self.components.values():
            for dim_map in component.dims:
                if isinstance(dim_map, DimMap):
                    units[dim_map.dim] = math.lcm(units[dim_map.dim], dim_map.unit)
        aligned = tuple(map(Aligned, self.selection, units, self.full_shape))
        buffers: dict[str, torch.Tensor] = {}
        origins: dict[str, Origin] = {}
        for name, component in self.components.items():
            tensor, dims = component.tensor, component.dims
            places = [
                [(0, 0, dim)] if isinstance(dim, int) else aligned[dim.dim].places(dim, length)
                for length, dim in zip(tensor.shape, dims, strict=True)
            ]
            shape = stored_shape(dims, [each.length for each in aligned])
            # Elements that are not read are decoded too, and not copied.
            buffers[name] = torch.zeros(shape, dtype=tensor.dtype, device=destination.device)
            for block in product(*places):
                source, view = tensor, buffers[name]
                for dim, (start, position, length) in enumerate(block):
                    if length != source.shape[dim]:
                        source = source.select(dim, [(start, start + length)])
                    view = view.narrow(dim, position, length)
                yield from source.read_steps(view)
            origins[name] = Origin(component.name, tuple(tensor.shape), tensor.dtype, dims, places)
        yield Decoded(buffers, aligned, self.decode, origins), destination


class Aligned:
    """The slice of one dim, aligned outwards to multiples of `unit`; the aligned ranges are stored consecutively."""

    def __init__(self, ranges: Sequence[Range], unit: int, length: int) -> None:
        self.ranges, self.unit = [(start, stop) for start, stop in ranges if start < stop], unit
        self.aligned = [(start * unit, min(stop * unit, length)) for start, stop in self._touched(unit)]
        self.length = sum(stop - start for start, stop in self.aligned)

    def _touched(self, unit: int) -> list[Range]:
        """The multiples of `unit` that contain selected indices, ascending; `unit` may differ from the aligned one."""
        return union((start // unit, (stop - 1) // unit + 1) for start, stop in self.ranges)

    def position(self, index: int) -> int:
        """Position of `index`, which lies in an aligned range, in the aligned buffer."""
        position = 0
        for start, stop in self.aligned:
            if start <= index < stop:
                break
            position += stop - start
        return position + index - start

    @cached_property
    def positions(self) -> list[Range]:
        """The selected ranges, in order, as positions in the aligned buffer."""
        return [(self.position(start), self.position(start) + stop - start) for start, stop in self.ranges]

    @cached_property
    def indices(self) -> list[int]:
        """The positions of the selected indices, in order."""
        return [position for start, stop in self.positions for position in range(start, stop)]

    def is_all_of(self, length: int) -> bool:
        """True if the selected indices are all of a buffer of `length`, in order."""
        return self.positions == [(0, length)]

    def take(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        """The selected indices of a buffer that begins with the aligned ranges in `dim`; a view if consecutive."""
        if self.is_all_of(buffer.shape[dim]):
            return buffer
        selected = [buffer.narrow(dim, start, stop - start) for start, stop in self.positions]
        return selected[0] if len(selected) == 1 else torch.cat(selected, dim)

    def spread(self, values: torch.Tensor, length: int) -> torch.Tensor:
        """Add values of the selected columns (rows, columns) at their positions in `length` columns; 0 elsewhere."""
        if self.is_all_of(length):
            return values
        buffer, column = values.new_zeros(len(values), length), 0
        for start, stop in self.positions:
            buffer[:, start:stop] += values[:, column : column + stop - start]
            column += stop - start
        return buffer

    def places(self, dim_map: DimMap, length: int) -> list[Place]:
        """The ranges of a stored dim of `length` to read for the slice."""
        result = []
        for first, last in self._touched(dim_map.unit):
            start, stop = first * dim_map.width, min(last * dim_map.width, length)
            result.append((start, dim_map.stored_length(self.position(first * dim_map.unit)), stop - start))
        return result


Place = tuple[int, int, int]
"""(start in the stored tensor, start in its buffer, length)."""


@dataclass(frozen=True)
class Origin:
    """The stored tensor that a buffer was read from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Dims
    places: Sequence[Sequence[Place]]
    """The ranges read, for each dim."""


@dataclass(frozen=True)
class Decoded:
    """The stored tensors of a slice in memory, in complete groups, with their decoder."""

    stored: StoredValues
    dims: Sequence[Aligned]
    decode: Decode
    origins: Mapping[str, Origin]
    """By name, as `stored`."""
    nbytes: int = 0

    def fill(self, destination: torch.Tensor) -> None:
        """Decode a few rows at a time, for every index of the leading dims; round once to the destination's dtype."""
        if not math.prod(destination.shape):
            return
        for places in product(*(enumerate(ranges.indices) for ranges in self.dims[:-2])):
            one, into = self, destination
            for dim, (index, position) in enumerate(places):
                one = one.at(dim, position)
                into = into.narrow(dim, index, 1)
            one._fill_rows(into)

    def _fill_rows(self, destination: torch.Tensor) -> None:
        """Decode the matrix at index 0 of the leading dims."""
        *_, rows, columns = self.dims
        step = max(at_a_time(destination.device) // columns.length // rows.unit, 1) * rows.unit
        for low in range(0, rows.length, step):
            tile = (low, min(low + step, rows.length))
            values = self.block(*tile)
            for row, first, last in _within(rows.positions, tile):
                selected = columns.take(values.narrow(-2, first - low, last - first), -1)
                copy(selected, destination.narrow(-2, row, last - first))

    def at(self, dim: int, position: int) -> Decoded:
        """The slice at one position of a leading dim's buffer, as a dim of length 1."""
        dims = list(self.dims)
        dims[dim] = Aligned([(0, 1)], 1, 1)
        return replace(self, stored=self._narrow(dim, position, position + 1), dims=dims)

    def block(self, first: int, last: int) -> torch.Tensor:
        """Decode rows [first, last) of the aligned buffers, complete groups; the values have all aligned columns."""
        *leading, _, columns = self.dims
        shape = (*(1 for _ in leading), last - first, columns.length)
        return self.decode(self._narrow(len(leading), first, last), shape)

    def _narrow(self, dim: int, first: int, last: int) -> StoredValues:
        """Narrow the buffers to positions [first, last) of an aligned dim, complete groups."""
        narrowed = dict(self.stored)
        for name, origin in self.origins.items():
            for at, dim_map in enumerate(origin.dims):
                if isinstance(dim_map, DimMap) and dim_map.dim == dim:
                    start, stop = dim_map.stored_length(first), dim_map.stored_length(last)
                    narrowed[name] = narrowed[name].narrow(at, start, stop - start)
        return narrowed


def _within(ranges: Sequence[Range], tile: Range) -> Iterator[tuple[int, int, int]]:
    """Intersect `ranges` of a slice with `tile`: (index in the slice, start, stop) for each overlap."""
    index = 0
    for start, stop in ranges:
        low, high = max(start, tile[0]), min(stop, tile[1])
        if low < high:
            yield index + low - start, low, high
        index += stop - start
