"""Integers of 4 bits in the layout of torch's operator for CPUs, which multiplies bfloat16 inputs.

    aten::_weight_int4pack_mm_for_cpu(x (tokens, columns), packed, group, scales_and_zeros (groups, rows, 2))
    weight = (integer - 8) * scale + zero

The operator reads 4 bits of a weight where a product in bfloat16 reads 16, and is ahead for a few tokens. For more, the
weight is decoded a few rows at a time. The layout depends on the processor: `_block_rows` finds it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...checkpoint.quantization.affine import Affine
from ...slices.bundle import Decoded
from ...torch_api import int4_product, pack_int4
from .operator import CHUNK, Operator

GROUPS = (256, 128, 64, 32)
"""Columns that may share a scale in the operator."""


@dataclass(frozen=True, eq=False)
class Int4(Operator):
    """`x @ w.T` for a matrix (rows, columns) of integers of 4 bits."""

    title = "int4 operator"
    is_row_major = False

    packed: torch.Tensor
    """(rows, columns / 2) uint8, rows padded to blocks, columns to groups."""
    scales_and_zeros: torch.Tensor
    """(groups, rows, 2) bfloat16."""
    offsets: torch.Tensor | int | None
    """Zero points, (groups, rows) uint8, or one for all; None: the value of 8 is that of `scales_and_zeros`."""
    group: int
    block: int
    """Rows that the layout interleaves."""

    @classmethod
    def of(cls, decoded: Decoded, affine: Affine) -> Int4 | None:
        """Convert a matrix; None if the operator cannot multiply it."""
        rows, columns = decoded.dims
        shape, block = (rows.length, columns.length), _block_rows()
        group = affine.group or next((group for group in GROUPS if shape[1] % group == 0), GROUPS[-1])
        if affine.bits != 4 or group not in GROUPS or block is None:
            return None
        padded, groups = _rounded(shape[0], block), -(-shape[1] // group)
        integers = affine.integers(decoded.parts, shape)
        packed = torch.empty(padded, groups * group // 2, dtype=torch.uint8)
        step = max(CHUNK // shape[1] // block, 1) * block
        for low in range(0, padded, step):
            tile = torch.zeros(min(step, padded - low), groups * group, dtype=torch.int32)
            part = integers[low : low + step]
            tile[: len(part), : shape[1]] = part
            packed[low : low + step] = pack_int4(tile, 1).view(len(tile), -1)
        scales, zeros = affine.scales(decoded.parts, shape)
        both = torch.zeros(groups, padded, 2, dtype=torch.bfloat16)
        both[:, : shape[0], 0] = scales.t()
        values_of_8 = scales.float() * 8 + zeros if affine.adds else (8.0 - zeros) * scales.float()
        both[:, : shape[0], 1] = values_of_8.t()
        offsets: torch.Tensor | int | None = None if affine.adds else 8
        if isinstance(zeros, torch.Tensor) and not affine.adds:
            offsets = torch.full((groups, padded), 8, dtype=torch.uint8)
            offsets[:, : shape[0]] = zeros.t()
        kept = {name: part for name, part in decoded.parts.items() if name != affine.part}
        return cls(rows, columns, kept, packed, both, offsets, group, block)

    @property
    def width(self) -> int:
        return self.packed.shape[1] * 2

    @property
    def height(self) -> int:
        return len(self.packed)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int4_product(x, self.packed, self.group, self.scales_and_zeros)
        return product

    def integers(self) -> torch.Tensor:
        pairs = self.packed.view(-1, self.width, self.block // 2)
        values = torch.stack((pairs & 0xF, pairs >> 4), 1).transpose(2, 3).reshape(len(self.packed), -1)
        return values[: self.rows.length, : self.columns.length]

    @property
    def unit(self) -> int:
        return self.block

    def decode(self, first: int, last: int) -> torch.Tensor:
        pairs = self.packed[first:last].view(-1, self.width, self.block // 2).transpose(0, 1)
        values = torch.empty(*pairs.shape[:2], 2, self.block // 2)
        values[:, :, 0], values[:, :, 1] = pairs & 0xF, pairs >> 4
        by_group = values.view(-1, self.group, last - first)
        # Contiguous scales are added and multiplied several times as fast.
        scales, zeros = self.scales_and_zeros[:, None, first:last].float().permute(3, 0, 1, 2).contiguous()
        if self.offsets is None:
            zeros = zeros - 8 * scales
        else:  # exact, while the values of 8 are rounded
            offsets = self.offsets
            zeros = -scales * (offsets[:, None, first:last] if isinstance(offsets, torch.Tensor) else offsets)
        torch.addcmul(zeros, by_group, scales, out=by_group)
        return values.view(self.width, last - first)


@cache
def _block_rows() -> int | None:
    """Rows that the operator's layout interleaves; None if torch lacks the operator, or its layout is another one.

    A block of B rows is stored as (columns, B / 2) bytes: byte i has row i in its low half and row B / 2 + i in the
    other. B is 64 with AVX-512 and 32 with AVX2.
    """
    if pack_int4 is None or int4_product is None:
        return None
    values = torch.randint(16, (128, 64), generator=torch.Generator().manual_seed(0))
    try:
        packed = pack_int4(values.int(), 1)
    except RuntimeError:
        return None
    for block in (64, 32):
        low, high = values.view(-1, 2, block // 2, 64).transpose(2, 3).unbind(1)
        if torch.equal(packed.flatten(), (low | high << 4).flatten().to(torch.uint8)):
            return block
    return None


def _rounded(length: int, unit: int) -> int:
    return -(-length // unit) * unit
