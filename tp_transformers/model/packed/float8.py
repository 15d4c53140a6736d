"""Values in float8 with scales, decoded without their scales: cheaper on a CPU, where decoding takes most of the time.

x @ (scale * values).T == scale * (x @ values.T)        a scale per row, or for all
                       == (x * scales) @ values.T       a scale per column of the same rows: blocks
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from ...checkpoint.quantization.float8 import Float8Values
from ...checkpoint.quantization.tiled import StoredRows, product_dtype, scratch
from ...checkpoint.reading.memory import FLOAT8_SHIFT, has_nan, shifted_float8
from ...slices.bundle import Decoded
from .operator import FEW, Operator, without

_ROWS = 64
"""Rows of a block from which on it is cheaper to multiply the inputs by its scales."""
_TILE = 1 << 20
"""Elements decoded at a time."""


@dataclass(frozen=True, eq=False)
class Float8(Operator, StoredRows):
    """`x @ w.T` for a matrix (rows, columns) in float8 with scales; `decoded` has views of `values`."""

    values: torch.Tensor
    """(rows, columns) float8; in subclasses padded."""
    scales: torch.Tensor
    """Float32, of blocks; see the subclasses."""

    integers_key = "values"

    @classmethod
    def of(cls, decoded: Decoded) -> Float8 | None:
        float8 = decoded.decode
        if not isinstance(float8, Float8Values):
            return None
        rows, columns = (dim.length for dim in decoded.dims)
        scales = decoded.stored["scales"].to(torch.float32)
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        if scales.ndim != 2:
            return None
        return cls.of_blocks(decoded, float8, scales, (float8.block[0] or rows, float8.block[1] or columns))

    @classmethod
    @abstractmethod
    def of_blocks(
        cls, decoded: Decoded, float8: Float8Values, scales: torch.Tensor, block: tuple[int, int]
    ) -> Float8 | None:
        """Convert a matrix with scales (row blocks, column blocks); None if the operator cannot multiply it."""

    def stored(self) -> torch.Tensor:
        return self.decoded.stored["values"].contiguous()


@dataclass(frozen=True, eq=False)
class Float8Cpu(Float8):
    """For a few tokens; decodes into memory that stays.

    `scales` are (row blocks, column blocks), or (rows, 1), times `FLOAT8_SHIFT`.
    """

    title = "fp8 decoded without scales"

    block: tuple[int, int]
    """Rows and columns that share a scale."""

    @classmethod
    def of_blocks(
        cls, decoded: Decoded, float8: Float8Values, scales: torch.Tensor, block: tuple[int, int]
    ) -> Float8Cpu | None:
        (rows, columns), values = decoded.dims, decoded.stored["values"]
        if values.dtype != torch.float8_e4m3fn or (scales.shape[1] > 1 and block[0] < _ROWS):
            return None
        if scales.shape[1] == 1:
            scales = of_rows(scales, block[0], rows.length)
        return cls(rows, columns, decoded, without(decoded.stored, "values"), values, scales * FLOAT8_SHIFT, block)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `Tiled.product`."""
        is_float32 = len(x) <= FEW and product_dtype(x) == torch.float32
        return self.multiply(x) if is_float32 and not self._has_nan else StoredRows.product(self, x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self.height, dtype=torch.float32, device=x.device)
        step = max(_TILE // self.width, 1)
        for block, inputs in self._inputs(x.to(torch.float32)):
            for first in block[::step]:
                rows = slice(first, min(first + step, block.stop))
                tile = self.values[rows]
                values = shifted_float8(tile, scratch(tile.numel() * 3 // 2 + 1, inputs))
                torch.mm(inputs, values.t(), out=y[:, rows])
        return (y.mul_(self.scales.t()) if self._is_by_row else y).to(x.dtype)

    def _inputs(self, x: torch.Tensor) -> Iterator[tuple[range, torch.Tensor]]:
        """Ranges of rows, and the inputs times the scales of their columns."""
        if self._is_by_row:
            yield range(self.height), x
            return
        size, columns = self.block
        x = pad(x, (0, -self.width % columns)).unflatten(1, (-1, columns))
        for first, scales in zip(range(0, self.height, size), self.scales, strict=True):
            yield range(first, min(first + size, self.height)), (x * scales[:, None]).flatten(1)[:, : self.width]

    @property
    def _is_by_row(self) -> bool:
        return self.scales.shape[1] == 1

    @cached_property
    def _has_nan(self) -> bool:
        return has_nan(self.values)


def of_rows(scales: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """Scales of row blocks (blocks, 1) as one for each of the rows, (rows, 1)."""
    return scales.expand(rows, 1) if len(scales) == 1 else scales.repeat_interleave(block, 0)[:rows]
