"""MXFP4 (GPT-OSS): experts in 4 bits, with one exponent for every 32 values along their input features.

NAME_blocks  (experts, out, in / 32, 16) uint8, two values per byte; packed pre-sharded checkpoints merge the last dims
NAME_scales  (experts, out, in / 32) uint8

The parameter NAME is (experts, in, out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...slices.composed import Transpose, reshaped
from ...slices.lazy import LazyTensor
from .bundle import Component, DimMap, StoredValues
from .format import (
    FP4,
    Format,
    Part,
    Tensors,
    bundle,
    constant,
    inconsistent,
    multiply_blocks,
    pair_table,
    stored_tensor,
    unpack_pairs,
    without_values,
)

_BLOCK, _BIAS = 32, 127
_DOUBLED = pair_table(FP4 * 2)
_HALVED_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS - 1)
"""Byte of a scale -> half of its power of two: the largest power overflows float32, its half does not."""


@dataclass(frozen=True)
class Mxfp4(Format):
    """Every tensor that has `_blocks` and `_scales`."""

    title = "MXFP4"

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        result = dict(tensors)
        for name in sorted(tensors):
            if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" not in tensors:
                raise inconsistent(name, "scales without blocks", "both")
            if not name.endswith("_blocks"):
                continue
            param = name.removesuffix("_blocks")
            blocks = stored_tensor(tensors, name, 3 if tensors[name].ndim == 3 else 4, torch.uint8)
            experts, rows, *width = blocks.shape
            if width[-1] * 2 % _BLOCK or (len(width) == 2 and width[-1] * 2 != _BLOCK):
                raise inconsistent(name, f"blocks of {width[-1]} bytes", f"{_BLOCK // 2}")
            pairs, lead = reshaped(blocks, (experts, rows, math.prod(width))), (DimMap(0), DimMap(1))
            parts: dict[str, Part | Component] = {
                "pairs": Component(pairs, (*lead, DimMap(2, 2)), name),
                "scales": Part(f"{param}_scales", (*lead, DimMap(2, _BLOCK)), [torch.uint8]),
            }
            values = bundle(param, tensors, parts, (experts, rows, pairs.shape[2] * 2), _decode, torch.float32)
            del result[name], result[f"{param}_scales"]
            result[param] = Transpose(values, 1, 2)
        return result

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if len(shape) != 3 or shape[1] % _BLOCK:  # experts alone
            return {}
        experts, columns, rows = shape
        blocks = without_values(torch.uint8, experts, rows, columns // _BLOCK, _BLOCK // 2)
        return {f"{name}_blocks": blocks, f"{name}_scales": without_values(torch.uint8, *blocks.shape[:3])}

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (-1, _BLOCK // 2)) if name.endswith("_blocks") else tensor


def _decode(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    powers = constant(_HALVED_POWERS, stored["scales"].device)[stored["scales"].int()]
    return multiply_blocks(unpack_pairs(stored["pairs"], constant(_DOUBLED, stored["pairs"].device)), powers, (_BLOCK,))
