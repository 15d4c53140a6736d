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
        pairs = self.packed[first:last].view(-1, self.width, self.unit // 2).mT.contiguous()
        values = pairs.new_empty(len(pairs), 2, *pairs.shape[1:])
        torch.bitwise_and(pairs, 0xF, out=values[:, 0])
        torch.bitwise_right_shift(pairs, 4, out=values[:, 1])
        return values.view(last - first, self.width)


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
