"""nf4 and fp4 of bitsandbytes, multiplied by the kernel of that package for CPUs, which takes bfloat16 inputs.

bitsandbytes::gemv_4bit(x (tokens, columns), packed, shape, scales (blocks, rows) bfloat16, map (16), block)

A block of 32 rows is stored as (columns / 2, 16, 2) bytes: byte (c, r, i) has column 2 c + i of row r in its low half,
and of row 16 + r in the other. Source: `_convert_weight_packed_for_cpu` in bitsandbytes/functional.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import pad

from ...checkpoint.quantization.bitsandbytes import Blocks
from ...slices.bundle import Decoded
from .operator import Operator, without

_ROWS = 32
_BLOCKS = (32, 64, 128, 256, 512, 1024)
_KINDS = ("nf4", "fp4")
_NIBBLES = 0x0F0F0F0F0F0F0F0F


@dataclass(frozen=True, eq=False)
class Blocks4(Operator):
    """`x @ w.T` for a matrix (rows, columns) of 4 bits with a scale per block of columns."""

    title = "bitsandbytes operator"

    packed: torch.Tensor
    """(rows, columns / 2) uint8, rows padded to `_ROWS`."""
    scales: torch.Tensor
    """(blocks, rows) bfloat16."""
    block: Blocks
    kind: str

    @classmethod
    def of(cls, decoded: Decoded) -> Blocks4 | None:
        block = decoded.decode
        if not isinstance(block, Blocks) or block.block not in _BLOCKS:
            return None
        values = decoded.stored["map"]
        kind = next((kind for kind, known in _maps().items() if values.is_meta or torch.equal(known, values)), None)
        if kind is None or not _is_exact(kind):
            return None
        missing = -decoded.dims[0].length % _ROWS
        pairs = pad(decoded.stored["values"], (0, 0, 0, missing))
        scales = pad(block.scales(decoded.stored), (0, 0, 0, missing)).t().to(torch.bfloat16).contiguous()
        rows, columns = decoded.dims
        return cls(rows, columns, without(decoded.stored, cls.integers_key), pack(pairs), scales, block, kind)

    integers_key = "values"

    @property
    def width(self) -> int:
        return self.packed.shape[1] * 2

    @property
    def height(self) -> int:
        return len(self.packed)

    @property
    def unit(self) -> int:
        return _ROWS

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(x, self.packed, self.scales, self.kept["map"], self.block.block)

    def stored(self) -> torch.Tensor:
        return unpack(self.packed)[: self.rows.length]

    def decode(self, first: int, values: torch.Tensor) -> None:
        # By the package: several times as fast as `Blocks`, with the same bits.
        last = first + len(values)
        kept = {name: tensor[first:last] if name in ("scales", "of") else tensor for name, tensor in self.kept.items()}
        scales = pad(self.block.scales(kept), (0, 0, 0, last - first - len(kept["scales"]))).flatten()
        pairs, shape = unpack(self.packed[first:last]).flatten(), list(values.shape)
        values.copy_(_package().dequantize_4bit(pairs, scales, self.block.block, self.kind, shape, values.dtype))


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


@cache
def _maps() -> Mapping[str, torch.Tensor]:
    """Values of 4 bits, by the package's name of them; empty if it is not installed or has no kernel for this CPU."""
    if find_spec("bitsandbytes") is None:
        return {}
    try:
        from bitsandbytes.functional import get_4bit_type, has_avx512bf16  # type: ignore[import-not-found]

        return {kind: get_4bit_type(kind, device="cpu") for kind in _KINDS} if has_avx512bf16() else {}
    except Exception:  # another release of the package, or one whose library cannot be loaded
        return {}


@cache
def _is_exact(kind: str) -> bool:
    """True if the kernel computes what the layout says, on this machine and with this release of the package."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(256, (2 * _ROWS, 48), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 5, (3, len(pairs)), generator=generator).to(torch.bfloat16)
    values = _maps()[kind]
    weight = values[torch.stack((pairs >> 4, pairs & 0xF), -1).flatten(1).long()]
    weight *= scales.float().t().repeat_interleave(32, 1)
    x = torch.randint(-4, 5, (3, 96), generator=generator).to(torch.bfloat16)
    expected = x.float() @ weight.t()
    try:
        error = (_multiply(x, pack(pairs), scales, values, 32).float() - expected).abs().max()
        decoded = _package().dequantize_4bit(pairs.flatten(), scales.t().float().flatten(), 32, kind, [64, 96], x.dtype)
    except Exception:
        return False
    return bool(error < 1e-2 * expected.abs().max()) and torch.equal(decoded, weight.to(x.dtype))
