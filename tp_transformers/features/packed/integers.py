"""Integers of 4 or 8 bits in the layout of an operator of torch that multiplies bfloat16 inputs.

4 bits, in groups     x (tokens, columns), packed, group, scales_and_zeros (groups, rows, 2)
                      weight = (integer - 8) * scale + zero
8 bits, a scale a row x (tokens, columns), weight (rows, columns) int8, scales (rows) bfloat16

The operators read 4 or 8 bits of a weight where a product in bfloat16 reads 16, and are ahead for a few tokens. For
more tokens, the weight is decoded a few rows at a time. On a GPU the operator of 8 bits computes each output in one
thread, whose reads of the weight do not meet those of its neighbours (`aten/src/ATen/native/cuda/int8mm.cu`). There the
integers are cast to bfloat16, which holds them exactly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import pad

from ...torch_api import take
from ..quantized.affine import Affine
from ..quantized.bundle import Decoded, at_a_time
from .tiled import IntegerOperator, without

pack_int4 = take("torch.ops.aten._convert_weight_to_int4pack_for_cpu", None)
int4_product = take("torch.ops.aten._weight_int4pack_mm_for_cpu", None)
pack_int4_for_gpu = take("torch.ops.aten._convert_weight_to_int4pack", None)
int4_product_of_gpu = take("torch.ops.aten._weight_int4pack_mm", None)
GROUPS = (256, 128, 64, 32)
"""Columns that may share a scale in the operators."""
_ROWS, _TILES = 8, 8
_COLUMNS = 16 * _TILES


@dataclass(frozen=True, eq=False)
class Int4(IntegerOperator):
    """`x @ w.T` for a matrix of integers of 4 bits; `values` are uint8, padded, and `unit` rows are stored together."""

    title = "int4 operator"
    per_item = 2

    scales_and_zeros: torch.Tensor
    """(groups, rows, 2) bfloat16."""
    offsets: torch.Tensor | int | None
    """Zero points, (groups, rows) uint8, or one for all; None: the value of 8 is that of `scales_and_zeros`."""
    group: int

    @classmethod
    def of_integers(cls, decoded: Decoded, affine: Affine) -> Int4 | None:
        shape, device = [dim.length for dim in decoded.dims], decoded.stored[affine.integers_key].device
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
        return cls(without(decoded, affine.integers_key), packed, both, offsets, group)

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


@dataclass(frozen=True, eq=False)
class Int4Cpu(Int4):
    """For CPUs: `aten::_weight_int4pack_mm_for_cpu`.

    A block of B rows is stored as (columns, B / 2) bytes: byte i has row i in its low half and row B / 2 + i in the
    other. B is 64 with AVX-512 and 32 with AVX2: `_block_rows` finds it out.
    """

    @classmethod
    def units(cls, device: torch.device) -> tuple[int, int] | None:
        block = _block_rows()
        return None if block is None else (block, 1)

    @staticmethod
    def pack(values: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = pack_int4(values.int(), 1)
        return packed

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = int4_product(x, self.values, self.group, self.scales_and_zeros)
        return product

    @property
    def unit(self) -> int:
        return _block_rows() or 1

    def unpack(self, first: int, last: int) -> torch.Tensor:
        pairs = self.values[first:last].view(-1, self.width, self.unit // 2).mT.contiguous()
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


@dataclass(frozen=True, eq=False)
class Int4Cuda(Int4):
    """For GPUs from NVIDIA: `aten::_weight_int4pack_mm`, for compute capability 8.0 and later.

    Source: `aten/src/ATen/native/cuda/int4mm.cu` in torch. Packed from bytes with the first column of a pair in the
    high half, to int32 (rows / 8, columns / 128, 32, 4): the B operand of tensor cores' m16n8k16, with 8 tiles of 16
    columns together. Word j of lane t has row t / 4 and the columns 32 j + 8 i + 2 (t % 4) + h, at bit 4 (4 h + i).
    """

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
        words = self.values[first:last].view(torch.int32)
        return words.view((last - first) // _ROWS, self.width // _COLUMNS, _ROWS, 4, _TILES // 2)


int8_product = take("torch.ops.aten._weight_int8pack_mm", None)
_UNIT = 32
"""The operator reads columns in vectors of up to 32, also beyond the last one."""


@dataclass(frozen=True, eq=False)
class Int8(IntegerOperator):
    """`x @ w.T` for a matrix (rows, columns) of integers of 8 bits."""

    title = "int8 operator"

    scales: torch.Tensor
    """(rows) bfloat16."""
    is_unsigned: bool
    """True if the stored integers are uint8; `values`, int8 with columns padded to `_UNIT`, are 128 less."""

    @classmethod
    def of_integers(cls, decoded: Decoded, affine: Affine) -> Int8 | None:
        shape = tuple(dim.length for dim in decoded.dims)
        integers = affine.integers(decoded.stored, shape)
        scales, zeros = affine.scales(decoded.stored, shape)
        is_unsigned = integers.dtype == torch.uint8
        has_zeros = isinstance(zeros, torch.Tensor) or zeros != (128 if is_unsigned else 0)
        if int8_product is None or affine.bits != 8 or affine.group is not None or has_zeros:
            return None
        values = (integers ^ 128).view(torch.int8) if is_unsigned else integers
        values = pad(values, (0, -shape[1] % _UNIT)).contiguous()
        scales = scales.to(torch.bfloat16).expand(shape[0], 1).flatten().contiguous()
        return cls(without(decoded, affine.integers_key), values, scales, is_unsigned)

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
