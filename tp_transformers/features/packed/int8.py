"""Integers of 8 bits with one scale per row, multiplied by torch's operator, which takes bfloat16 inputs.

aten::_weight_int8pack_mm(x (tokens, columns), weight (rows, columns) int8, scales (rows) bfloat16)

On a GPU that operator computes each output in one thread, whose reads of the weight do not meet those of its neighbours
(`aten/src/ATen/native/cuda/int8mm.cu`). There the integers are cast to bfloat16, which holds them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ...torch_api import take
from ..quantized.affine import Affine
from ..quantized.bundle import Decoded, at_a_time
from .operator import IntegerOperator, without

int8_product = take("torch.ops.aten._weight_int8pack_mm", None)
_UNIT = 32
"""The operator reads columns in vectors of up to 32, also beyond the last one."""


@dataclass(frozen=True, eq=False)
class Int8(IntegerOperator):
    """`x @ w.T` for a matrix (rows, columns) of integers of 8 bits."""

    title = "int8 operator"

    values: torch.Tensor
    """(rows, columns) int8, columns padded to `_UNIT`; 128 less than the stored integers if those are uint8."""
    scales: torch.Tensor
    """(rows) bfloat16."""
    is_unsigned: bool

    @classmethod
    def of_integers(cls, decoded: Decoded, affine: Affine) -> Int8 | None:
        rows, columns = decoded.dims
        shape = (rows.length, columns.length)
        integers = affine.integers(decoded.stored, shape)
        scales, zeros = affine.scales(decoded.stored, shape)
        is_unsigned = integers.dtype == torch.uint8
        has_zeros = isinstance(zeros, torch.Tensor) or zeros != (128 if is_unsigned else 0)
        if int8_product is None or affine.bits != 8 or affine.group is not None or has_zeros:
            return None
        values = (integers ^ 128).view(torch.int8) if is_unsigned else integers
        values = pad(values, (0, -shape[1] % _UNIT)).contiguous()
        scales = scales.to(torch.bfloat16).expand(shape[0], 1).flatten().contiguous()
        return cls(rows, columns, without(decoded.stored, affine.integers_key), affine, values, scales, is_unsigned)

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def height(self) -> int:
        return len(self.values)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int8_product(x, self.values, self.scales)
        return product

    def decode(self, first: int, values: torch.Tensor) -> None:
        rows = slice(first, first + len(values))
        values.copy_(self.values[rows]).mul_(self.scales[rows, None])

    def integers(self) -> torch.Tensor:
        values = self.values[:, : self.columns.length]
        return values.view(torch.uint8) ^ 128 if self.is_unsigned else values


@dataclass(frozen=True, eq=False)
class Int8Gpu(Int8):
    """See the module: the integers cast, a matrix product, and the scales of its outputs."""

    title = "int8 cast to bfloat16"

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """For any number of tokens."""
        tiles = self.values.split(max(at_a_time(x.device) // self.width, 1))
        return torch.cat([x @ tile.to(x.dtype).t() for tile in tiles], 1) * self.scales
