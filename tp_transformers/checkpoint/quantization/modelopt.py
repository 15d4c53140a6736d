"""ModelOpt (NVIDIA): float8 with a scale per tensor or row, and NVFP4; the tensors say which, not the config.

X.weight         (out, in) float8        X.weight_scale  () or (out) float32
X.weight         (out, in / 2) uint8     X.weight_scale  (out, in / 16) float8, X.weight_scale_2 () float32
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...slices.composed import Stack
from ...slices.lazy import LazyTensor
from ...slices.scaled import Scaled
from .compressed import Scheme
from .float8 import Float8
from .format import Tensors, inconsistent

_NVFP4 = Scheme(is_packed=True, bits=4, symmetric=True, group=16, block=None, micro="nvfp4-pack-quantized")


@dataclass(frozen=True)
class ModelOpt(Float8):
    """Weights with the scales `NAME_scale`; activations stay in floating point."""

    title = "ModelOpt"
    is_written = False
    suffix = "_scale"

    block: None = None
    is_dynamic: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOpt:
        return cls()

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {}  # the tensors say it, not the config

    @staticmethod
    def is_format_of(tensors: Tensors, names: Collection[str]) -> bool:
        """True if a float8 or NVFP4 weight of a checkpoint has scales that are not in `names`, those of the model."""
        return any(
            f"{name}_scale" in tensors
            and f"{name}_scale" not in names
            and (_is_nvfp4(tensors, name) or _has_row_scales(tensors, name))
            for name in tensors
            if name.endswith(".weight")
        )

    def dequantized(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        pairs = [name for name in tensors if name.endswith(".weight") and _is_nvfp4(tensors, name)]
        parts = {f"{name}{suffix}" for name in pairs for suffix in ("", "_scale", "_scale_2")}
        rest = {name: tensor for name, tensor in tensors.items() if name not in parts}
        result = super().dequantized(rest, stays_packed=stays_packed)
        for name in pairs:
            stored = {f"{name}_packed": tensors[name], f"{name}_scale": tensors[f"{name}_scale"]}
            stored[f"{name}_scale_2"] = tensors[f"{name}_scale_2"]
            result[name] = _NVFP4.weight(stored, name.removesuffix(".weight"))
        return result

    def _product(self, name: str, values: LazyTensor, scales: LazyTensor) -> Scaled:
        if not _has_row_scales({name: values, f"{name}_scale": scales}, name):
            got = f"{values.dtype} of shape {tuple(values.shape)} with scales of shape {tuple(scales.shape)}"
            raise inconsistent(name, got, "float8 with one scale, or one a row")
        if scales.numel() == 1:
            return super()._product(name, values, scales)
        return Scaled(values, Stack([scales], 1) if scales.ndim == 1 else scales, (1, values.shape[1]))


def _is_nvfp4(tensors: Tensors, name: str) -> bool:
    return f"{name}_scale_2" in tensors and tensors[name].dtype == torch.uint8


def _has_row_scales(tensors: Tensors, name: str) -> bool:
    """True for float8 with one scale, or one for each row of a matrix."""
    values, scales = tensors[name], tensors[f"{name}_scale"]
    by_row = values.ndim == 2 and tuple(scales.shape) in ((values.shape[0],), (values.shape[0], 1))
    is_float8 = values.dtype == torch.float8_e4m3fn and values.ndim > 1 and scales.dtype == torch.float32
    return is_float8 and (by_row or scales.numel() == 1)
