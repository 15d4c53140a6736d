"""FP8 (DeepSeek-V3, Qwen3-FP8, ...): float8 with a scale per block or per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ...slices.composed import Stack
from ...slices.lazy import LazyTensor
from .bundle import Bundle, Component, Decode, DimMap, StoredValues
from .casts import from_float8
from .format import Format, Tensors, bundle, inconsistent, multiply_blocks, unsupported, without_values

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Float8Values:
    """A `Decode` of a weight in float8: the stored tensors `values` and `scales`, multiplied by blocks."""

    decode: Decode
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None for all."""
    activations: int | None
    """Columns of a token that share a scale if the checkpoint quantises activations while it computes; 0 for all.

    None: activations stay in floating point, or have scales in the checkpoint.
    """

    def __call__(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        return self.decode(stored, shape)


@dataclass(frozen=True)
class Float8(Format):
    """Weights in float8 with the scales `NAME_scale_inv`."""

    title = "FP8"
    suffix: ClassVar[str] = "_scale_inv"
    """What the name of a weight's scales adds to the name of the weight."""

    block: tuple[int, int] | None
    """Rows and columns that share one scale; None for one scale per weight."""
    is_dynamic: bool = True
    """True if activations are quantised while the model computes: by blocks of columns, or else by token."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Float8:
        if settings.get("expert_dtype", "fp8") != "fp8":
            raise unsupported(f"fp8 and experts in {settings['expert_dtype']}", "one in FP8 alone")
        block = settings.get("weight_block_size")
        is_dynamic = settings.get("activation_scheme", "dynamic") == "dynamic"
        return cls(None if block is None else (int(block[0]), int(block[1])), is_dynamic)

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        """See `Format.dequantized`; tensors without a scale are unchanged.

        Raises CheckpointError if a float8 weight has no scale, or the scales do not match their weight.
        """
        scales = {name + self.suffix for name in tensors}
        result = {
            name: self.weight(name, tensor, tensors[name + self.suffix]) if name + self.suffix in tensors else tensor
            for name, tensor in tensors.items()
            if name not in scales
        }
        for name, tensor in result.items():
            if tensor.dtype in _FLOAT8:
                got = f"{tensor.dtype} without {name + self.suffix}"
                raise inconsistent(name, got, "a scale for each of its blocks")
        return result

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        counts = [-(-length // size) for length, size in zip(shape[-2:], self.block or (), strict=False)]
        scales = without_values(torch.float32, *shape[:-2], *counts) if counts else without_values(torch.float32)
        return {name: without_values(torch.float8_e4m3fn, *shape), name + self.suffix: scales}

    def weight(self, name: str, values: LazyTensor, scales: LazyTensor, block: tuple[int, int] | None = None) -> Bundle:
        """Build the weight `name`; `block`: rows and columns that share a scale, if the config does not tell.

        Raises CheckpointError unless it is in float8, with one scale per block.
        """
        shape, is_whole = tuple(values.shape), scales.numel() == 1  # one scale for all, even if the config has blocks
        if values.dtype not in _FLOAT8 or len(shape) < 2:
            got = f"{values.dtype} of shape {shape} with scales"
            raise inconsistent(name, got, "a matrix of float8_e4m3fn or float8_e5m2")
        if not scales.dtype.is_floating_point:
            raise inconsistent(name, f"scales in {scales.dtype}", "scales in floating point")
        while scales.ndim < len(shape) and not is_whole:
            scales = Stack([scales], 0)
        sizes = shape if is_whole else (*(1 for _ in shape[:-2]), *(block or self.block or shape[-2:]))
        shared = [size if size < length else None for size, length in zip(sizes, shape, strict=True)]
        by_block = tuple(1 if size is None else DimMap(dim, size) for dim, size in enumerate(shared))
        components = {
            "values": Component(values, tuple(map(DimMap, range(len(shape)))), name),
            "scales": Component(scales, tuple(scales.shape) if is_whole else by_block, name + self.suffix),
        }
        activations = (self.block[1] if self.block else 0) if self.is_dynamic else None
        decode = Float8Values(partial(_decode, shared), (shared[-2], shared[-1]), activations)
        return bundle(name, {}, components, shape, decode, torch.float32)


def _decode(block: Sequence[int | None], stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return multiply_blocks(from_float8(stored["values"]), stored["scales"], block)
