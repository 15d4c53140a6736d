"""The layout of 4 bits for CPUs: `aten::_weight_int4pack_mm_for_cpu`.

A block of B rows is stored as (columns, B / 2) bytes: byte i has row i in its low half and row B / 2 + i in the other.
B is 64 with AVX-512 and 32 with AVX2: `_block_rows` finds it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...torch_api import int4_product, pack_int4
from .int4 import Int4


@dataclass(frozen=True, eq=False)
class Int4Cpu(Int4):
    """See `Int4`."""

    is_row_major = False

    @classmethod
    def units(cls, device: torch.device) -> tuple[int, int] | None:
        block = _block_rows()
        return None if block is None else (block, 1)

    @staticmethod
    def pack(values: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = pack_int4(values.int(), 1)
        return packed

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int4_product(x, self.packed, self.group, self.scales_and_zeros)
        return product

    @property
    def unit(self) -> int:
        return _block_rows() or 1

    def unpack(self, first: int, last: int) -> torch.Tensor:
        return self._columns(first, last).t()

    def decode(self, first: int, values: torch.Tensor) -> None:
        integers = self._columns(first, first + values.shape[1])
        self.scale(integers.unflatten(0, (-1, self.group)), first, values.unflatten(0, (-1, self.group)), 1)

    def _columns(self, first: int, last: int) -> torch.Tensor:
        """The integers of rows of the layout, (width, rows) uint8."""
        pairs = self.packed[first:last].view(-1, self.width, self.unit // 2).transpose(0, 1)
        values = torch.empty(*pairs.shape[:2], 2, pairs.shape[2], dtype=torch.uint8)
        values[:, :, 0], values[:, :, 1] = pairs & 0xF, pairs >> 4
        return values.view(self.width, last - first)


@cache
def _block_rows() -> int | None:
    """Rows that the operator's layout interleaves; None if torch lacks the operator, or its layout is another one."""
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
