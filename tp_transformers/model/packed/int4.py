"""Integers of 4 bits in the layout of an operator of torch that multiplies bfloat16 inputs.

    x (tokens, columns), packed, group, scales_and_zeros (groups, rows, 2)
    weight = (integer - 8) * scale + zero

The operators read 4 bits of a weight where a product in bfloat16 reads 16, and are ahead for a few tokens. For more
tokens, the weight is decoded a few rows at a time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch

from ...checkpoint.quantization.affine import Affine
from ...slices.bundle import Decoded, at_a_time
from .operator import IntegerOperator, without

GROUPS = (256, 128, 64, 32)
"""Columns that may share a scale in the operators."""


@dataclass(frozen=True, eq=False)
class Int4(IntegerOperator):
    """`x @ w.T` for a matrix (rows, columns) of integers of 4 bits."""

    title = "int4 operator"

    packed: torch.Tensor
    """(rows, columns / 2) uint8, padded; `unit` rows are stored together."""
    scales_and_zeros: torch.Tensor
    """(groups, rows, 2) bfloat16."""
    offsets: torch.Tensor | int | None
    """Zero points, (groups, rows) uint8, or one for all; None: the value of 8 is that of `scales_and_zeros`."""
    group: int

    @classmethod
    def of_integers(cls, decoded: Decoded, affine: Affine) -> Int4 | None:
        rows, columns = decoded.dims
        shape, device = (rows.length, columns.length), decoded.stored[affine.integers_key].device
        group = affine.group or next((group for group in GROUPS if shape[1] % group == 0), GROUPS[-1])
        units = cls.units(device)
        if affine.bits != 4 or group not in GROUPS or units is None:
            return None
        height, width = _rounded(shape[0], units[0]), _rounded(shape[1], math.lcm(group, units[1]))
        integers = affine.integers(decoded.stored, shape)
        packed = torch.empty(height, width // 2, dtype=torch.uint8, device=device)
        step = max(at_a_time(device) // width // units[0], 1) * units[0]
        for low in range(0, height, step):
            tile = torch.zeros(min(step, height - low), width, dtype=torch.uint8, device=device)
            chunk = integers[low : low + step]
            tile[: len(chunk), : shape[1]] = chunk
            packed[low : low + step] = cls.pack(tile).view(torch.uint8).view(len(tile), -1)
        scales, zeros = affine.scales(decoded.stored, shape)
        groups = -(-shape[1] // group)
        both = torch.zeros(width // group, height, 2, dtype=torch.bfloat16, device=device)
        both[:groups, : shape[0], 0] = scales.t()
        values_of_8 = scales.float() * 8 + zeros if affine.adds else (8.0 - zeros) * scales.float()
        both[:groups, : shape[0], 1] = values_of_8.t()
        offsets: torch.Tensor | int | None = None if affine.adds else 8
        if isinstance(zeros, torch.Tensor) and not affine.adds:
            offsets = torch.full(both.shape[:2], 8, dtype=torch.uint8, device=device)
            offsets[:groups, : shape[0]] = zeros.t()
        kept = without(decoded.stored, affine.integers_key)
        return cls(rows, columns, kept, affine, packed, both, offsets, group)

    @classmethod
    @abstractmethod
    def units(cls, device: torch.device) -> tuple[int, int] | None:
        """Rows and columns that the layout takes multiples of; None if this torch has no operator for `device`."""

    @staticmethod
    @abstractmethod
    def pack(values: torch.Tensor) -> torch.Tensor:
        """Pack integers (rows, columns) uint8, by the operator's own function."""

    @abstractmethod
    def unpack(self, first: int, last: int) -> torch.Tensor:
        """The integers of rows of the layout, (rows, width) uint8 in memory of their own; the inverse of `pack`."""

    @property
    def width(self) -> int:
        return self.packed.shape[1] * 2

    @property
    def height(self) -> int:
        return len(self.packed)

    def integers(self) -> torch.Tensor:
        return self.unpack(0, self.height)[: self.rows.length, : self.columns.length]

    def decode(self, first: int, values: torch.Tensor) -> None:
        """See `Tiled.decode`; rounds once."""
        last = first + len(values)
        integers, values = (each.unflatten(1, (-1, self.group)) for each in (self.unpack(first, last), values))
        # Contiguous: others are multiplied several times as slowly.
        scales, values_of_8 = self.scales_and_zeros[:, first:last].permute(2, 1, 0).contiguous().unsqueeze(3)
        if self.offsets is None:
            scales = scales.float()
            values.copy_(torch.addcmul(values_of_8 - 8 * scales, integers.float(), scales))
        else:  # exact, while the values of 8 are rounded; differences are those of int8
            offsets = self.offsets
            integers -= offsets[:, first:last].t().unsqueeze(2) if isinstance(offsets, torch.Tensor) else offsets
            values.copy_(integers.view(torch.int8)).mul_(scales.to(values.dtype))


def _rounded(length: int, unit: int) -> int:
    return -(-length // unit) * unit
