"""nf4 and fp4 of bitsandbytes, multiplied by the kernels of that package, which take bfloat16 inputs.

on a CPU   bitsandbytes::gemv_4bit(x (tokens, columns), packed, shape, scales (blocks, rows) bfloat16, map (16), block)
on a GPU   bitsandbytes::gemv_4bit(x (1, columns), pairs as stored, shape, scales (rows * blocks) float32, map, block)

For a CPU, a block of 32 rows is stored as (columns / 2, 16, 2) bytes: byte (c, r, i) has column 2 c + i of row r in its
low half, and of row 16 + r in the other. Source: `_convert_weight_packed_for_cpu` in bitsandbytes/functional.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import pad

from ..quantized.bitsandbytes import Blocks
from ..quantized.bundle import Decoded, StoredValues
from .tiled import Operator, StoredRows, without

_ROWS = 32
_BLOCKS = (32, 64, 128, 256, 512, 1024)
_KINDS = ("nf4", "fp4")
_NIBBLES = 0x0F0F0F0F0F0F0F0F


@dataclass(frozen=True, eq=False)
class Blocks4(Operator):
    """`x @ w.T` for a matrix of 4 bits with a scale per block of columns; `values` have rows padded to `_ROWS`."""

    title = "bitsandbytes operator"
    per_item = 2

    scales: torch.Tensor
    """(blocks, rows) bfloat16."""
    block: Blocks
    kind: str

    @classmethod
    def of(cls, decoded: Decoded) -> Blocks4 | None:
        found = _kind_of(decoded, cls)
        if found is None:
            return None
        block, kind = found
        missing = (0, 0, 0, -decoded.dims[0].length % _ROWS)
        pairs, scales = pad(decoded.stored["values"], missing), pad(block.scales(decoded.stored), missing)
        return cls(without(decoded, "values"), *cls.arranged(pairs, scales), block, kind)

    @staticmethod
    def arranged(pairs: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs and scales (rows, blocks) as the kernel takes them."""
        return pack(pairs), scales.t().to(torch.bfloat16).contiguous()

    @property
    def unit(self) -> int:
        return _ROWS

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(x, self.values, self.scales, self.decoded.stored["map"], self.block.block)

    def restored(self) -> torch.Tensor:
        return unpack(self.values)[: self.rows.length]

    def decode(self, first: int, values: torch.Tensor) -> None:
        # By the package: several times as fast as `Blocks`, with the same bits.
        last = first + len(values)
        kept = {
            name: tensor[first:last] if name in ("scales", "of") else tensor
            for name, tensor in self.decoded.stored.items()
        }
        scales = pad(self.block.scales(kept), (0, 0, 0, last - first - len(kept["scales"]))).flatten()
        pairs, shape = unpack(self.values[first:last]).flatten(), list(values.shape)
        values.copy_(_package().dequantize_4bit(pairs, scales, self.block.block, self.kind, shape, values.dtype))


@dataclass(frozen=True, eq=False)
class Blocks4Cuda(StoredRows, Operator):
    """The same on a GPU, as it is stored: the package multiplies one token, and decodes for more."""

    title = Blocks4.title
    few = 1

    block: Blocks

    @classmethod
    def of(cls, decoded: Decoded) -> Blocks4Cuda | None:
        found = _kind_of(decoded, cls)
        if found is None:
            return None
        block, kind = found
        by_package = replace(decoded, decode=partial(_decode, block, kind))
        return cls(by_package, decoded.stored["values"], block)

    @staticmethod
    def arranged(pairs: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pairs, scales

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(
            x, self.values, self.block.scales(self.decoded.stored), self.decoded.stored["map"], self.block.block
        )

    def restored(self) -> torch.Tensor:
        return self.values


def pack(pairs: torch.Tensor) -> torch.Tensor:
    """Pack stored pairs (rows, columns / 2), with complete blocks of rows; see the module."""
    low, high = pairs.view(-1, 2, _ROWS // 2, pairs.shape[1]).mT.unbind(1)
    return torch.stack((low >> 4 | high & 0xF0, low & 0xF | high << 4), -1).view(pairs.shape)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpack to stored pairs; the inverse of `pack`."""
    words = packed.view(torch.int16).view(-1, packed.shape[1], _ROWS // 2).mT.contiguous()
    rows = packed.new_empty(len(words), 2, *words.shape[1:])
    for half, nibbles in enumerate((words, words >> 4)):
        eight = nibbles.view(torch.int64) & _NIBBLES
        rows[:, half] = (eight << 4 | eight >> 8).view(torch.int16)  # the lower byte of two
    return rows.view(packed.shape)


def _package() -> Any:
    """The operators of bitsandbytes, which its import defines."""
    return torch.ops.bitsandbytes


def _multiply(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, block: int
) -> torch.Tensor:
    shape = [len(packed), packed.shape[1] * 2]
    product: torch.Tensor = _package().gemv_4bit(x, packed, shape, scales, values, block)
    return product


def _decode(block: Blocks, kind: str, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    scales = block.scales(stored).flatten()
    decoded: torch.Tensor = _package().dequantize_4bit(
        stored["values"].flatten(), scales, block.block, kind, list(shape), block.dtype
    )
    return decoded


def _kind_of(decoded: Decoded, operator: type[Blocks4 | Blocks4Cuda]) -> tuple[Blocks, str] | None:
    """The blocks and the package's name of their 16 values; None if it has no exact operators for these."""
    block = decoded.decode
    if not isinstance(block, Blocks) or block.block not in _BLOCKS:
        return None
    values = decoded.stored["map"]
    device = torch.device("cpu") if values.is_meta else values.device
    maps = _maps(device.type).items()
    kind = next((kind for kind, known in maps if values.is_meta or torch.equal(known, values.cpu())), None)
    return (block, kind) if kind is not None and _is_exact(kind, device, operator) else None


@cache
def _maps(device: str) -> Mapping[str, torch.Tensor]:
    """Values of 4 bits, by the package's name of them; empty if it is not installed or has no kernel for this CPU."""
    if find_spec("bitsandbytes") is None:
        return {}
    try:
        from bitsandbytes.functional import get_4bit_type, has_avx512bf16  # type: ignore[import-not-found]

        is_able = device != "cpu" or has_avx512bf16()
        return {kind: get_4bit_type(kind, device="cpu") for kind in _KINDS} if is_able else {}
    except Exception:  # another release of the package, or one whose library cannot be loaded
        return {}


@cache
def _is_exact(kind: str, device: torch.device, operator: type[Blocks4 | Blocks4Cuda]) -> bool:
    """True if the kernels compute what the layout says, on this device and with this release of the package."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(256, (2 * _ROWS, 48), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 5, (len(pairs), 3), generator=generator).float()
    values = _maps(device.type)[kind]
    weight = values[torch.stack((pairs >> 4, pairs & 0xF), -1).flatten(1).long()] * scales.repeat_interleave(32, 1)
    x = torch.randint(-4, 5, (min(operator.few, 3), 96), generator=generator).to(torch.bfloat16)
    expected = x.float() @ weight.t()
    x, pairs, scales, values = (each.to(device) for each in (x, pairs, scales, values))
    try:
        product = _multiply(x, *operator.arranged(pairs, scales), values, 32).float().cpu()
        decoded = _package().dequantize_4bit(pairs.flatten(), scales.flatten(), 32, kind, [64, 96], x.dtype).cpu()
    except Exception:
        return False
    is_close = (product - expected).abs().max() < 1e-2 * expected.abs().max()
    return bool(is_close) and torch.equal(decoded, weight.to(x.dtype))
