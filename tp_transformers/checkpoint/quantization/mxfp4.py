"""MXFP4 (GPT-OSS): experts in 4 bits, with one exponent for every 32 values along their input features.

NAME_blocks  (experts, out, in / 32, 16) uint8, two values per byte; packed pre-sharded checkpoints merge the last dims
NAME_scales  (experts, out, in / 32) uint8

The parameter NAME is (experts, in, out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...slices.bundle import Cut, Member, Parts
from ...slices.composed import Transpose, merge_last
from ...slices.lazy import LazyTensor
from .format import Format, Tensors, bundle, inconsistent, member

_BLOCK, _BIAS = 32, 127
_HALF = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_PAIRS = torch.stack((_HALF.repeat(16), _HALF.repeat_interleave(16)), -1).view(torch.int64).flatten()
"""Byte -> its two float32 values, low half first, as one int64, so that one lookup gives both."""


@dataclass(frozen=True)
class Mxfp4(Format):
    """Every tensor that has `_blocks` and `_scales`."""

    title = "MXFP4"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def expressed(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        result = dict(tensors)
        for name in sorted(tensors):
            if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" not in tensors:
                raise inconsistent(name, "scales without blocks", "both")
            if not name.endswith("_blocks"):
                continue
            param = name.removesuffix("_blocks")
            blocks = member(tensors, name, 3 if tensors[name].ndim == 3 else 4, torch.uint8)
            scales = member(tensors, f"{param}_scales", 3, torch.uint8)
            experts, rows, *width = blocks.shape
            if width[-1] * 2 % _BLOCK or (len(width) == 2 and width[-1] * 2 != _BLOCK):
                raise inconsistent(name, f"blocks of {width[-1]} bytes", f"{_BLOCK // 2}")
            lead = (Cut(0), Cut(1))
            members = {
                "pairs": Member(merge_last(blocks) if blocks.ndim == 4 else blocks, (*lead, Cut(2, 2)), name),
                "scales": Member(scales, (*lead, Cut(2, _BLOCK)), f"{param}_scales"),
            }
            values = bundle(param, members, (experts, rows, math.prod(width) * 2), torch.float32, _decode)
            del result[name], result[f"{param}_scales"]
            result[param] = Transpose(values, 1, 2)
        return result

    def published(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (-1, _BLOCK // 2)) if name.endswith("_blocks") else tensor


def _decode(parts: Parts, shape: Sequence[int]) -> torch.Tensor:
    """Multiply by the scale in two factors, since the largest power of two overflows float32."""
    pairs, scales = parts["pairs"], parts["scales"]
    values = _PAIRS.to(pairs.device).index_select(0, pairs.flatten().int()).view(torch.float32)
    powers = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    ones, first = torch.ones(powers.shape, device=powers.device), powers // 2
    values = values.view(*scales.shape, _BLOCK)
    return values.mul_(torch.ldexp(ones, first)).mul_(torch.ldexp(ones, powers - first)).flatten(-2)
