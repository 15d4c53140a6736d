"""Values in float8 with scales: multiplied in float8 on a GPU, and decoded without their scales on a CPU.

Decoding takes most of the time on a CPU, and less without scales:

x @ (scale * values).T == scale * (x @ values.T)        a scale per row, or for all
                       == (x * scales) @ values.T       a scale per column of the same rows: blocks
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad

from ..quantized.bundle import Decoded
from ..quantized.casts import FLOAT8_SHIFT, has_nan, shifted_float8
from ..quantized.float8 import Float8Values
from .tiled import FEW, Operator, StoredRows, product_dtype, scratch

_ROWS = 64
"""Rows of a block from which on it is cheaper to multiply the inputs by its scales."""
_TILE = 1 << 20
"""Elements decoded at a time."""
_UNIT, _BLOCK = 16, 128
_TOKENS = 4
"""Tokens of which cuBLAS takes multiples with scales of blocks, as in Transformer Engine's `Float8BlockQuantizer`."""
_FLOAT8 = torch.float8_e4m3fn

scaled_mm: Any = getattr(torch.nn.functional, "scaled_mm", None)
"""Since torch 2.10."""


@dataclass(frozen=True, eq=False)
class Float8(StoredRows, Operator):
    """`x @ w.T` for a matrix in float8 with scales; `decoded` has views of `values`."""

    scales: torch.Tensor
    """Float32, of blocks; see the subclasses."""

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

    def restored(self) -> torch.Tensor:
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
        values = decoded.stored["values"]
        if values.dtype != torch.float8_e4m3fn or (scales.shape[1] > 1 and block[0] < _ROWS):
            return None
        if scales.shape[1] == 1:
            scales = of_rows(scales, block[0], len(values))
        return cls(decoded, values, scales * FLOAT8_SHIFT, block)

    def product(self, x: torch.Tensor) -> torch.Tensor:
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


@dataclass(frozen=True, eq=False)
class Float8Cuda(Float8):
    """For GPUs from NVIDIA: `torch.nn.functional.scaled_mm`, which takes inputs in float8.

    `values` are padded; `scales` are (1, rows), or those of blocks (row blocks, column blocks), padded. Only for
    checkpoints that quantise activations in each forward, as they do: a scale of max / 448 for each token (compute
    capability 8.9 to 10.x), or for each of its blocks of 128 columns (9.x, with CUDA 12.9). Other weights are decoded.

    Source: `aten/src/ATen/native/cuda/ScaledBlas.cpp` in torch. Weights have multiples of 16 rows and columns, with
    blocks of 128: torch's own checks count complete ones. Scales of blocks: inputs (tokens, blocks) with strides (1,
    tokens), weights (blocks, row blocks) with strides (1, blocks), the blocks of columns padded to a multiple of 4.
    cuBLAS has no scales of tokens for capability 12.0, where torch 2.10 raises.
    """

    title = "fp8 operator, with activations quantised as in the checkpoint"

    by_blocks: bool

    @classmethod
    def of_blocks(
        cls, decoded: Decoded, float8: Float8Values, scales: torch.Tensor, block: tuple[int, int]
    ) -> Float8Cuda | None:
        (rows, columns), values = decoded.dims, decoded.stored["values"]
        by_blocks = float8.activations == _BLOCK
        if values.dtype != _FLOAT8 or not _is_able(values.device, by_blocks):
            return None
        if by_blocks:
            if not all(size in (_BLOCK, dim.length) for size, dim in zip(block, decoded.dims, strict=True)):
                return None
            counts = [-(-dim.length // _BLOCK) for dim in decoded.dims]
            scales = pad(scales.expand(counts), (0, -counts[1] % 4)).contiguous()
        elif float8.activations == 0 and scales.shape[1] == 1:
            scales = pad(of_rows(scales, block[0], rows.length).t(), (0, -rows.length % _UNIT)).contiguous()
        else:
            return None
        unit = _BLOCK if by_blocks else _UNIT
        missing = (0, -columns.length % unit, 0, -rows.length % unit)
        values = pad(values.view(torch.uint8), missing).contiguous().view(_FLOAT8)
        views = {**decoded.stored, "values": values[: rows.length, : columns.length]}
        return cls(replace(decoded, stored=views), values, scales, by_blocks)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """By the operator for any number of tokens, so that all of a sequence are computed alike."""
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        kinds, tokens = torch.nn.functional.ScalingType, len(x)
        x = pad(x, (0, self.values.shape[1] - x.shape[1], 0, -tokens % _TOKENS if self.by_blocks else 0))
        blocks = x.to(torch.float32).unflatten(1, (-1, _BLOCK if self.by_blocks else x.shape[1]))
        largest = blocks.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny * 1024)
        # New memory: the operator also checks the strides of dims of length 1, which torch leaves as they are.
        strides = (1, len(x)) if self.by_blocks and largest.shape[1] > 1 else (1, 1)
        scales = torch.empty_strided(largest.shape, strides, dtype=torch.float32, device=x.device)
        torch.div(largest, torch.finfo(_FLOAT8).max, out=scales)
        inputs = (blocks / scales.unsqueeze(2)).flatten(1).to(_FLOAT8)
        if self.by_blocks:
            recipes = (scales, kinds.BlockWise1x128, self.scales.t(), kinds.BlockWise128x128)
        else:
            recipes = (scales, kinds.RowWise, self.scales, kinds.RowWise)
        y: torch.Tensor = scaled_mm(inputs, self.values.t(), *recipes, output_dtype=torch.bfloat16)
        return y[:tokens, : self.height]


def _is_able(device: torch.device, by_blocks: bool) -> bool:
    """True if torch has the operator for `device`."""
    if scaled_mm is None or torch.version.hip is not None or torch.version.cuda is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    has_blocks = capability[0] == 9 and tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)
    return has_blocks if by_blocks else (8, 9) <= capability < (11, 0)
