"""AWQ: 4 bits packed along the output features, eight per word: the four even ones, then the four odd ones.

X.qweight  (in, out / 8) int32
X.qzeros   (groups, out / 8) int32
X.scales   (groups, out)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...slices.lazy import LazyTensor
from .affine import Affine, by_groups, pack_words
from .bundle import Bundle, Component, DimMap, StoredValues
from .format import (
    Format,
    Tensors,
    bundle,
    count_groups,
    dequantized_modules,
    inconsistent,
    packed,
    quantized_modules,
    stored_tensor,
    stored_words,
    unpack,
    unsupported,
)

_BITS = 4
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Awq(Format):
    """Every weight that has a `qweight`."""

    title = "AWQ"

    group: int | None
    """Input features that share a scale; None for all."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Awq:
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if bits != _BITS or version != "gemm" or not settings.get("zero_point", True):
            zeros = "" if settings.get("zero_point", True) else " without zero points"
            got = f"AWQ in {bits} bits{zeros}, in the version {version}"
            raise unsupported(got, f"one in {_BITS} bits with zero points, in the version gemm")
        group = settings.get("group_size", settings.get("q_group_size", 128))
        return cls(None if group < 1 else group)

    def dequantized(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        kinds, modules = ("qzeros", "scales"), quantized_modules(tensors)
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind in kinds and module not in modules:
                got = "scales of activations" if kind == "scales" else "zero points of no weight"
                raise inconsistent(name, got, "weights alone in AWQ")
        return dequantized_modules(tensors, kinds, self._weight)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return stored_words(name.removesuffix(".weight"), shape, dtype, _BITS, self.group, packed_dim=1)

    def _weight(self, tensors: Tensors, module: str) -> Bundle:
        words = stored_tensor(tensors, f"{module}.qweight", 2, torch.int32)
        scales = stored_tensor(tensors, f"{module}.scales", 2, *_FLOATS)
        zeros = stored_tensor(tensors, f"{module}.qzeros", 2, torch.int32)
        columns, rows = words.shape[0], words.shape[1] * 32 // _BITS
        count_groups(module, columns, self.group, scales, zeros)
        groups = None if self.group is None else DimMap(1, self.group)
        components = {
            "words": Component(words, (DimMap(1), packed(0, _BITS)), f"{module}.qweight"),
            "scales": Component(scales, (groups, DimMap(0)), f"{module}.scales"),
            "zeros": Component(zeros, (groups, packed(0, _BITS)), f"{module}.qzeros"),
        }
        decode = Affine(partial(_decode, self.group), _BITS, self.group, "words", _integers, _scales, _words, 0)
        return bundle(f"{module}.weight", components, (rows, columns), scales.dtype, decode)


def _decode(group: int | None, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return by_groups(_integers(stored, shape), *_scales(stored, shape), group)


def _integers(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return _unpack(stored["words"], shape[0])


def _scales(stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return stored["scales"].t(), _unpack(stored["zeros"], shape[0])


def _unpack(words: torch.Tensor, rows: int) -> torch.Tensor:
    """Unpack (n, rows / 8) to (rows, n)."""
    values: torch.Tensor = unpack(words, _BITS, rows).unflatten(1, (-1, 2, 4))
    return values.mT.flatten(1).t()


def _words(values: torch.Tensor) -> torch.Tensor:
    return pack_words(values.t().unflatten(1, (-1, 4, 2)).mT.flatten(1), _BITS)
