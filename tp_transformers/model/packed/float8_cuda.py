"""The layout of float8 for GPUs from NVIDIA: `torch.nn.functional.scaled_mm`, which takes inputs in float8.

Only for checkpoints that quantise activations in each forward, as they do: a scale of max / 448 for each token (compute
capability 8.9 to 10.x), or for each of its blocks of 128 columns (9.x, with CUDA 12.9). Other weights are decoded.

Source: `aten/src/ATen/native/cuda/ScaledBlas.cpp` in torch. Weights have multiples of 16 rows and columns, with blocks
of 128: torch's own checks count complete ones. Scales of blocks: inputs (tokens, blocks) with strides (1, tokens),
weights (blocks, row blocks) with strides (1, blocks), the blocks of columns padded to a multiple of 4. cuBLAS has no
scales of tokens for capability 12.0, where torch 2.10 raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from ...checkpoint.quantization.float8 import Float8Values
from ...slices.bundle import Decoded
from .float8 import Float8, of_rows
from .operator import without

_UNIT, _BLOCK = 16, 128
_TOKENS = 4
"""Tokens of which cuBLAS takes multiples with scales of blocks, as in Transformer Engine's `Float8BlockQuantizer`."""
_FLOAT8 = torch.float8_e4m3fn

scaled_mm: Any = getattr(torch.nn.functional, "scaled_mm", None)
"""Since torch 2.10."""


@dataclass(frozen=True, eq=False)
class Float8Cuda(Float8):
    """`values` are padded; `scales` are (1, rows), or those of blocks (row blocks, column blocks), padded."""

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
        kept = without(decoded.stored, cls.integers_key)
        views = {**kept, cls.integers_key: values[: rows.length, : columns.length]}
        return cls(rows, columns, replace(decoded, stored=views), kept, values, scales, by_blocks)

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
