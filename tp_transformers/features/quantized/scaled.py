"""Float8 tensors with one scale per block, read straight into the destination.

    Scaled(values, scales, block=(2, 2))      AABB     [a b     the blocks of A times a, of B times b, ...
                                              AABB      c d]
                                              CCDD

A slice reads its own values, and the scales of the blocks that it overlaps. The float8 values are first cast into the
destination, since every wider dtype holds them exactly, and multiplied there in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ...slices.layout import Range, joined
from ...slices.lazy import LazyTensor, ReadStep
from ...slices.stored import Selection, compose, lengths

_TILE = 1 << 18
"""Elements multiplied at a time: in float32 they fit into a core's cache."""

Repeat = tuple[int, int]
"""(index of a scale, number of consecutive indices of the destination that it applies to)."""


class Scaled(LazyTensor):
    """`values` (..., n, m) in float8 times `scales` (..., ceil(n / block), ceil(m / block)); the product is float32."""

    def __init__(
        self, values: LazyTensor, scales: LazyTensor, block: Sequence[int], selection: Selection | None = None
    ) -> None:
        """`block` is the shape of a block with one scale, with the ndim of `values`; the last of a dim may be shorter.

        Raises ValueError unless there is one scale per block.
        """
        expected = tuple(-(-length // size) for length, size in zip(values.shape, block, strict=True))
        if tuple(scales.shape) != expected:
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} for values of shape {tuple(values.shape)} in blocks of "
                f"{' x '.join(map(str, block))}, which are {' x '.join(map(str, expected))}"
            )
        self.values, self.scales, self.block = values, scales, tuple(block)
        self.selection = selection or tuple(((0, length),) for length in values.shape)
        self.shape, self.dtype = torch.Size(lengths(self.selection)), torch.float32

    def select(self, dim: int, ranges: Sequence[Range]) -> Scaled:
        selection = list(self.selection)
        selection[dim] = compose(selection[dim], ranges)
        return Scaled(self.values, self.scales, self.block, tuple(selection))

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        """Read the scales into a buffer and the values into `destination`, then multiply in place."""
        values, scales, repeats = self._selected()
        factors = torch.empty(scales.shape, dtype=torch.float32, device=destination.device)
        yield from scales.read_steps(factors)
        yield from values.read_steps(destination)
        yield _Factors(factors, repeats), destination

    def _selected(self) -> tuple[LazyTensor, LazyTensor, tuple[tuple[Repeat, ...], ...]]:
        """The selected values, the scales of their blocks, and for each dim the ranges of indices with one scale."""
        values, scales, repeats = self.values, self.scales, []
        for dim, (ranges, size) in enumerate(zip(self.selection, self.block, strict=True)):
            values = values.select(dim, ranges)
            blocks = [
                (block, min(stop, (block + 1) * size) - max(start, block * size))
                for start, stop in ranges
                if start < stop
                for block in range(start // size, (stop - 1) // size + 1)
            ]
            touched = sorted({block for block, _ in blocks})
            scales = scales.select(dim, joined((block, block + 1) for block in touched) or [(0, 0)])
            position = {block: index for index, block in enumerate(touched)}
            repeats.append(
                tuple(
                    (position[block], sum(length for _, length in group))
                    for block, group in groupby(blocks, key=lambda entry: entry[0])
                )
            )
        return values, scales, tuple(repeats)


@dataclass(frozen=True)
class _Factors:
    """The step that multiplies the values by their scales in place, once both are read."""

    factors: torch.Tensor
    """(..., a, b), float32."""
    repeats: tuple[tuple[Repeat, ...], ...]
    """For each dim, ranges of indices with one factor."""
    nbytes: int = 0

    def fill(self, destination: torch.Tensor) -> None:
        """Multiply in float32, a few rows at a time; round once to the destination's dtype."""
        if math.prod(destination.shape):
            _multiply(destination, self.factors, self.repeats)


def _multiply(values: torch.Tensor, factors: torch.Tensor, repeats: Sequence[Sequence[Repeat]]) -> None:
    """Multiply `values` in place: for each index of the leading dims, one range of rows at a time."""
    if len(repeats) > 2:
        places = [index for index, length in repeats[0] for _ in range(length)]
        for item, index in zip(values, places, strict=True):
            _multiply(item, factors[index], repeats[1:])
        return
    if values.stride(0) == 1 != values.stride(1):
        values, factors, repeats = values.t(), factors.t(), repeats[::-1]
    rows, columns = repeats
    of_column, lengths = (torch.tensor(item, device=factors.device) for item in zip(*columns, strict=True))
    of_column = of_column.repeat_interleave(lengths)
    step = max(_TILE // values.shape[1], 1)
    start = 0
    for index, length in rows:
        factor = factors[index, of_column]
        for tile in values[start : start + length].split(step):
            tile.copy_(tile.to(torch.float32) * factor)
        start += length
