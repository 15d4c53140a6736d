"""Quantised tensors: several stored tensors that stand for one, and are cut as one.

    256 columns of int4, 32 a group        values  (8, 32) int32    8 columns an index
                                           scales  (8, 8)          32 columns an index
    its columns [80, 256)                  values[:, 10:32], scales[:, 2:8]

A `Bundle` has the shape of the tensor that it stands for, and is selected in its indices. Each member is read in its
own units, into memory that has room for whole units of all members, so that a format decodes whole units alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from .composed import Expression
from .layout import Range, joined
from .lazy import LazyTensor, Leaf
from .stored import Selection, compose, lengths

_TILE = 1 << 20
"""Elements that are decoded at a time."""


@dataclass(frozen=True)
class Cut:
    """A dim of a member that goes with a dim of the whole: `width` indices of it for every `unit` of the whole."""

    dim: int
    unit: int = 1
    width: int = 1

    def members(self, length: int) -> int:
        """Indices of the member for the first `length` of the whole."""
        return -(-length * self.width // self.unit)


@dataclass(frozen=True)
class Member:
    """One of the stored tensors; a dim without a cut is read completely, whatever is selected."""

    tensor: LazyTensor
    cuts: tuple[Cut | None, ...]
    name: str = ""
    """Name in the checkpoint."""


Parts = Mapping[str, torch.Tensor]
"""Values of the members of whole units, by name."""

Decode = Callable[[Parts, Sequence[int]], torch.Tensor]
"""The values, of a shape, that parts stand for; elements depend on their own units alone."""


class Bundle(Expression):
    """Members that stand for a tensor of `shape` (..., n, m) and `dtype`, which `decode` makes of them."""

    def __init__(
        self,
        members: Mapping[str, Member],
        shape: Sequence[int],
        dtype: torch.dtype,
        decode: Decode,
        selection: Selection | None = None,
    ) -> None:
        """Raises ValueError where a member is not as long as its cuts say."""
        for name, member in members.items():
            expected = tuple(
                length if cut is None else cut.members(shape[cut.dim])
                for length, cut in zip(member.tensor.shape, member.cuts, strict=True)
            )
            if tuple(member.tensor.shape) != expected:
                raise ValueError(f"{name} of shape {tuple(member.tensor.shape)}, not {expected}")
        self.members, self.whole, self.decode = members, tuple(shape), decode
        self.selection = selection or tuple(((0, length),) for length in shape)
        self.shape, self.dtype = torch.Size(lengths(self.selection)), dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Bundle:
        selection = list(self.selection)
        selection[dim] = compose(selection[dim], ranges)
        return Bundle(self.members, self.whole, self.dtype, self.decode, tuple(selection))

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """The members into memory of their own, then their value into place."""
        units = [
            math.lcm(*(cut.unit for member in self.members.values() for cut in member.cuts if cut and cut.dim == dim))
            for dim in range(len(self.whole))
        ]
        hulls = [
            _Hull(ranges, unit, length) for ranges, unit, length in zip(self.selection, units, self.whole, strict=True)
        ]
        parts: dict[str, torch.Tensor] = {}
        origins: dict[str, Origin] = {}
        for name, member in self.members.items():
            places = [
                [(0, 0, length)] if cut is None else hulls[cut.dim].places(cut, length)
                for length, cut in zip(member.tensor.shape, member.cuts, strict=True)
            ]
            shape = [
                length if cut is None else cut.members(hulls[cut.dim].length)
                for length, cut in zip(member.tensor.shape, member.cuts, strict=True)
            ]
            # What is not read is decoded too, and left out.
            parts[name] = torch.zeros(shape, dtype=member.tensor.dtype, device=destination.device)
            for box in product(*places):
                part, view = member.tensor, parts[name]
                for dim, (start, position, length) in enumerate(box):
                    if length != part.shape[dim]:
                        part = part.select(dim, [(start, start + length)])
                    view = view.narrow(dim, position, length)
                yield from part.pieces(view)
            origins[name] = Origin(member.name, tuple(member.tensor.shape), places)
        cuts = {name: member.cuts for name, member in self.members.items()}
        yield Decoded(parts, cuts, tuple(hulls), self.decode, origins), destination


class _Hull:
    """The whole units of one dim that a selection touches, one after the other."""

    def __init__(self, ranges: Sequence[Range], unit: int, length: int) -> None:
        self.ranges, self.unit = [(start, stop) for start, stop in ranges if start < stop], unit
        self.blocks = joined((at * unit, min((at + 1) * unit, length)) for at in self._touched(unit))
        self.length = sum(stop - start for start, stop in self.blocks)

    def _touched(self, unit: int) -> list[int]:
        """Units of another size, in ascending order, that hold selected indices."""
        return sorted({at for start, stop in self.ranges for at in range(start // unit, (stop - 1) // unit + 1)})

    def position(self, index: int) -> int:
        """Place of a selected index, or of one in its unit, in the hull."""
        position = 0
        for start, stop in self.blocks:
            if start <= index < stop:
                break
            position += stop - start
        return position + index - start

    @cached_property
    def runs(self) -> list[Range]:
        """The selected indices, in their order, as ranges of the hull."""
        return [(self.position(start), self.position(start) + stop - start) for start, stop in self.ranges]

    def places(self, cut: Cut, length: int) -> list[Place]:
        """The part of a member of `length` that the selection touches."""
        made: list[Place] = []
        for at in self._touched(cut.unit):
            start, stop = at * cut.width, min((at + 1) * cut.width, length)
            position = cut.members(self.position(at * cut.unit))
            if made and (made[-1][0] + made[-1][2], made[-1][1] + made[-1][2]) == (start, position):
                made[-1] = (*made[-1][:2], stop - made[-1][0])
            else:
                made.append((start, position, stop - start))
        return made


Place = tuple[int, int, int]
"""(index in a stored tensor, index in the part of it, count)."""


@dataclass(frozen=True)
class Origin:
    """The stored tensor that a part was read of."""

    name: str
    shape: tuple[int, ...]
    places: Sequence[Sequence[Place]]
    """The range that was read of each dim."""


@dataclass(frozen=True)
class Decoded:
    """The members of a selection in memory, of whole units, and the values that they stand for."""

    parts: Parts
    cuts: Mapping[str, Sequence[Cut | None]]
    hulls: Sequence[_Hull]
    decode: Decode
    origins: Mapping[str, Origin]
    """By the names of the parts."""
    nbytes: int = 0

    def fill(self, destination: torch.Tensor) -> None:
        """Decode index by index of leading dims, a few rows at a time; round once to the destination's dtype."""
        if not math.prod(destination.shape):
            return
        *leading, rows, columns = self.hulls
        selected = [[at for start, stop in hull.runs for at in range(start, stop)] for hull in leading]
        step = max(_TILE // columns.length // rows.unit, 1) * rows.unit
        for places in product(*map(enumerate, selected)):
            parts, into = self.parts, destination
            for dim, (index, position) in enumerate(places):
                parts = self._narrow(parts, dim, (position, position + 1))
                into = into.narrow(dim, index, 1)
            for low in range(0, rows.length, step):
                tile = (low, min(low + step, rows.length))
                shape = (*(1 for _ in leading), tile[1] - low, columns.length)
                values = self.decode(self._narrow(parts, len(leading), tile), shape)
                for row, first, last in _within(rows.runs, tile):
                    some = values.narrow(-2, first - low, last - first)
                    for column, start, stop in _within(columns.runs, (0, columns.length)):
                        place = into.narrow(-2, row, last - first).narrow(-1, column, stop - start)
                        _copy(some[..., start:stop], place)

    def _narrow(self, parts: Parts, dim: int, tile: Range) -> Parts:
        """The parts of the indices `tile` of a dim of the hull, which are whole units."""
        narrowed = dict(parts)
        for name, cuts in self.cuts.items():
            for at, cut in enumerate(cuts):
                if cut is not None and cut.dim == dim:
                    start, stop = cut.members(tile[0]), cut.members(tile[1])
                    narrowed[name] = narrowed[name].narrow(at, start, stop - start)
        return narrowed


def _within(runs: Sequence[Range], tile: Range) -> Iterator[tuple[int, int, int]]:
    """(index in the selection, start, stop) of what is in `tile` of each of the `runs` that a selection consists of."""
    index = 0
    for start, stop in runs:
        low, high = max(start, tile[0]), min(stop, tile[1])
        if low < high:
            yield index + low - start, low, high
        index += stop - start


def _copy(values: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy to a destination of any strides; torch transposes element by element unless both sides are contiguous."""
    if destination.stride(-2) == 1 != destination.stride(-1):
        destination.mT.copy_(values.to(destination.dtype).mT.contiguous())
    else:
        destination.copy_(values)
