"""The layout of 4 bits for GPUs from NVIDIA: `aten::_weight_int4pack_mm`, for compute capability 8.0 and later.

Source: `aten/src/ATen/native/cuda/int4mm.cu` in torch. Packed from bytes with the first column of a pair in the high
half, to int32 (rows / 8, columns / 128, 32, 4): the B operand of tensor cores' m16n8k16, with 8 tiles of 16 columns
together. Word j of lane t has row t / 4 and the columns 32 j + 8 i + 2 (t % 4) + h, at bit 4 (4 h + i).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...torch_api import int4_product_of_gpu, pack_int4_for_gpu
from .int4 import Int4

_ROWS, _TILES = 8, 8
_COLUMNS = 16 * _TILES


@dataclass(frozen=True, eq=False)
class Int4Cuda(Int4):
    """See `Int4`."""

    @classmethod
    def units(cls, device: torch.device) -> tuple[int, int] | None:
        has_operators = pack_int4_for_gpu is not None and int4_product_of_gpu is not None
        is_able = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
        return (_ROWS, _COLUMNS) if has_operators and is_able else None

    @staticmethod
    def pack(values: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = pack_int4_for_gpu(values[:, ::2] << 4 | values[:, 1::2], _TILES)
        return packed

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int4_product_of_gpu(
            x, self._words(0, self.height).flatten(2, 3), self.group, self.scales_and_zeros
        )
        return product

    @property
    def unit(self) -> int:
        return _ROWS

    def unpack(self, first: int, last: int) -> torch.Tensor:
        words = self._words(first, last)
        shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32).view(2, 4)
        values = (words[..., None, None] >> shifts & 0xF).to(torch.uint8)
        # (rows / 8, columns / 128, row, t % 4, j, h, i) -> row, columns
        return values.permute(0, 2, 1, 4, 6, 3, 5).reshape(last - first, self.width)

    def _words(self, first: int, last: int) -> torch.Tensor:
        """(rows / 8, columns / 128, 8, 4, 4) int32."""
        words = self.packed[first:last].view(torch.int32)
        return words.view((last - first) // _ROWS, self.width // _COLUMNS, _ROWS, 4, _TILES // 2)
