"""ModelOpt (NVIDIA): float8 with a scale per tensor or row, and NVFP4; the tensors say which, not the config.

Without tensors, `quantization_config` or `hf_quant_config.json` says which.

X.weight         (out, in) float8        X.weight_scale  () or (out) float32
X.weight         (out, in / 2) uint8     X.weight_scale  (out, in / 16) float8, X.weight_scale_2 () float32
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...slices.composed import Stack
from ...slices.lazy import LazyTensor
from .bundle import Bundle, DimMap, StoredValues
from .float8 import Float8
from .format import (
    Part,
    Tensors,
    bundle,
    described,
    inconsistent,
    multiply_blocks,
    unpack_fp4,
    unsupported,
    without_values,
)

FILE = "hf_quant_config.json"
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MIXED_PRECISION")
_GROUP = 16
"""Columns of NVFP4 that share a scale."""


@dataclass(frozen=True)
class ModelOpt(Float8):
    """Weights with the scales `NAME_scale`; activations stay in floating point."""

    title = "ModelOpt"
    is_written = False
    suffix = "_scale"

    block: None = None
    is_dynamic: bool = False
    algorithm: str | None = None
    """One of `_ALGORITHMS`; None if only the tensors say it."""
    excluded: Collection[str] = ()
    """Patterns of modules that are not quantised."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ModelOpt:
        algorithm = settings.get("quant_algo")
        if algorithm not in (None, *_ALGORITHMS):
            raise unsupported(f"ModelOpt's {algorithm}", f"one of its {', '.join(_ALGORITHMS)}")
        return cls(algorithm=algorithm, excluded=settings.get("exclude_modules") or settings.get("ignore") or ())

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        module, algorithm = name.removesuffix(".weight"), self.algorithm or ""
        if any(fnmatchcase(module, pattern) for pattern in self.excluded):
            return {}
        if "NVFP4" in algorithm:
            return {} if shape[-1] % _GROUP else described(_parts(name, len(shape)).values(), shape, dtype)
        if "FP8" not in algorithm:
            return {}
        scales = without_values(torch.float32, *(shape[:1] if "PER_CHANNEL" in algorithm else ()))
        return {name: without_values(torch.float8_e4m3fn, *shape), f"{name}_scale": scales}

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

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        pairs = [name for name in tensors if name.endswith(".weight") and _is_nvfp4(tensors, name)]
        parts = {f"{name}{suffix}" for name in pairs for suffix in ("", "_scale", "_scale_2")}
        result = super().dequantized({name: tensor for name, tensor in tensors.items() if name not in parts})
        for name in pairs:
            *rows, width = tensors[name].shape
            named = _parts(name, len(rows) + 1)
            result[name] = bundle(name, tensors, named, (*rows, width * 2), _decode, torch.bfloat16)
        return result

    def weight(self, name: str, values: LazyTensor, scales: LazyTensor, block: tuple[int, int] | None = None) -> Bundle:
        if not _has_row_scales({name: values, f"{name}_scale": scales}, name):
            got = f"{values.dtype} of shape {tuple(values.shape)} with scales of shape {tuple(scales.shape)}"
            raise inconsistent(name, got, "float8 with one scale, or one a row")
        by_row = Stack([scales], 1) if scales.ndim == 1 and len(scales) > 1 else scales
        return super().weight(name, values, by_row, (1, values.shape[1]))


def _parts(name: str, ndim: int) -> dict[str, Part]:
    """The stored tensors of a weight in NVFP4."""
    lead = tuple(map(DimMap, range(ndim - 1)))
    return {
        "values": Part(name, (*lead, DimMap(ndim - 1, 2)), [torch.uint8]),
        "scales": Part(f"{name}_scale", (*lead, DimMap(ndim - 1, _GROUP)), [torch.float8_e4m3fn]),
        "factor": Part(f"{name}_scale_2", (), [torch.float32]),
    }


def _decode(stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    values, scales = unpack_fp4(stored["values"]), stored["scales"].float() * stored["factor"]
    return multiply_blocks(values, scales, (_GROUP,)).to(torch.bfloat16)


def _is_nvfp4(tensors: Tensors, name: str) -> bool:
    return f"{name}_scale_2" in tensors and tensors[name].dtype == torch.uint8


def _has_row_scales(tensors: Tensors, name: str) -> bool:
    """True for float8 with one scale, or one for each row of a matrix."""
    values, scales = tensors[name], tensors[f"{name}_scale"]
    by_row = values.ndim == 2 and tuple(scales.shape) in ((values.shape[0],), (values.shape[0], 1))
    is_float8 = values.dtype == torch.float8_e4m3fn and values.ndim > 1 and scales.dtype == torch.float32
    return is_float8 and (by_row or scales.numel() == 1)


def settings_beside(folder: Path) -> dict[str, Any]:
    """The settings of `hf_quant_config.json` in a folder; empty if it has no such file, or no quantised weights.

    Raises CheckpointError if the file is malformed.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        by, settings = content["producer"]["name"], dict(content["quantization"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        got, expected = f"{type(error).__name__}: {error}", "a JSON object with producer and quantization"
        raise CheckpointError(str(path), got=got, expected=expected, fix="Download it again.") from error
    return {"quant_method": "modelopt", **settings} if by == "modelopt" and settings.get("quant_algo") else {}
