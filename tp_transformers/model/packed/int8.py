"""Integers of 8 bits with one scale per row, multiplied by torch's operator, which takes bfloat16 inputs.

aten::_weight_int8pack_mm(x (tokens, columns), weight (rows, columns) int8, scales (rows) bfloat16)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from ...checkpoint.quantization.affine import Affine
from ...checkpoint.quantization.packed import product_dtype
from ...slices.bundle import Aligned, Decoded
from ...torch_api import int8_product

FEW = 64
"""Tokens up to which the operator is faster than decoding and torch's matrix product."""
_UNIT = 32
"""The operator reads columns in vectors of up to 32, also beyond the last one."""
_TILE = 1 << 20
"""Elements decoded at a time."""


@dataclass(frozen=True, eq=False)
class Int8:
    """`x @ w.T` for a matrix (rows, columns) of integers of 8 bits."""

    rows: Aligned
    columns: Aligned
    values: torch.Tensor
    """(rows, columns) int8, columns padded to `_UNIT`; 128 less than the stored integers if those are uint8."""
    scales: torch.Tensor
    """(rows) bfloat16."""
    is_unsigned: bool
    kept: Mapping[str, torch.Tensor]
    """The stored tensors without the integers."""

    @classmethod
    def of(cls, decoded: Decoded, affine: Affine) -> Int8 | None:
        """Convert a matrix; None if the operator cannot multiply it."""
        rows, columns = decoded.dims
        shape = (rows.length, columns.length)
        integers = affine.integers(decoded.parts, shape)
        scales, zeros = affine.scales(decoded.parts, shape)
        is_unsigned = integers.dtype == torch.uint8
        has_zeros = isinstance(zeros, torch.Tensor) or zeros != (128 if is_unsigned else 0)
        if int8_product is None or affine.bits != 8 or affine.group is not None or has_zeros:
            return None
        values = (integers ^ 128).view(torch.int8) if is_unsigned else integers
        values = pad(values, (0, -shape[1] % _UNIT)).contiguous()
        kept = {name: part for name, part in decoded.parts.items() if name != affine.part}
        scales = scales.to(torch.bfloat16).expand(shape[0], 1).flatten().contiguous()
        return cls(rows, columns, values, scales, is_unsigned, kept)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + self.scales.nbytes + sum(part.nbytes for part in self.kept.values())

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) -> (tokens, rows)."""
        x = self.columns.spread(x, self.values.shape[1]).contiguous()
        if len(x) <= FEW:
            y = int8_product(x, self.values, self.scales)
        else:
            y, step = x.new_empty(len(x), len(self.scales)), max(_TILE // x.shape[1], 1)
            x = x.to(product_dtype(x))
            for low in range(0, len(self.scales), step):
                tile = slice(low, low + step)
                y[:, tile] = linear(x, self._decode(tile, x.dtype))
        return self.rows.take(y, 1)

    def weight(self) -> torch.Tensor:
        """Decode to (rows, columns)."""
        return self.rows.take(self.columns.take(self._decode(slice(None), torch.bfloat16), 1), 0)

    def integers(self) -> torch.Tensor:
        """The integers (rows, columns) as they were stored."""
        values = self.values[:, : self.columns.length]
        return values.view(torch.uint8) ^ 128 if self.is_unsigned else values

    def _decode(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.values[rows].to(dtype).mul_(self.scales[rows, None])
