"""compressed-tensors: integers and float8 with a scale per tensor, row, group of columns or block.

pack-quantized                                    X.weight_packed  (out, in * bits / 32) int32
int-, float- and naive-quantized                  X.weight         (out, in) int8 or float8
nvfp4- and mxfp4-pack-quantized                   X.weight_packed  (out, in / 2) uint8
mxfp8-quantized                                   X.weight         (out, in) float8
scales by tensor, channel, group, block           X.weight_scale   (1), (out, 1), (out, in / group), (out / b, in / b)
scales of MX: exponents; of NVFP4: float8         X.weight_global_scale (1) float32: divisor of the NVFP4 scales
zero points, unless symmetric                     X.weight_zero_point, which pack-quantized packs along its rows
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...slices.lazy import LazyTensor
from .affine import Affine, pack_words
from .bundle import Bundle, Decode, DimMap, Dims, StoredValues
from .casts import from_float8
from .float8 import Float8Values
from .format import (
    Format,
    Locate,
    Part,
    Tensors,
    bundle,
    described,
    inconsistent,
    multiply_blocks,
    packed,
    stored_names,
    stored_tensor,
    subtract_blocks,
    unpack,
    unpack_fp4,
    unsupported,
)

_PACKED = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_MICRO = {
    _NVFP4: (4, "tensor_group", torch.float8_e4m3fn),
    "mxfp4-pack-quantized": (4, "group", torch.uint8),
    "mxfp8-quantized": (8, "group", torch.uint8),
}
"""Micro-scaling formats (small groups): bits, strategy and dtype of the scales."""
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized", *_MICRO)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LINEAR = nn.Linear(1, 1, device="meta")


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a `config_groups` entry."""

    form: str
    """One of `_FORMATS`."""
    bits: int
    symmetric: bool
    group: int | None
    """Columns that share a scale; None for all."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for one scale per row or per tensor."""
    activations: int | None = None
    """See `Float8Values.activations`."""
    is_float: bool = False
    by_tensor: bool = False
    """True if all rows and columns share a scale."""

    @property
    def is_micro(self) -> bool:
        """True for a micro-scaling format."""
        return self.form in _MICRO

    @property
    def is_packed(self) -> bool:
        """True if several values share a word or a byte."""
        return self.form == _PACKED or (self.is_micro and self.bits == 4)

    @classmethod
    def of(cls, group: Mapping[str, Any], default: str) -> Scheme:
        """Parse a `group` of a config. Raises UnsupportedError on unknown settings."""
        weights, form = group["weights"], group.get("format") or default
        size, block = weights.get("group_size"), weights.get("block_structure")
        strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size < 0 else "group")
        bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
        expected = f"{', '.join(_FORMATS)}, of integers or float8, with scales by tensor, channel, group or block"
        if form not in _FORMATS:
            raise unsupported(f"compressed-tensors in the format {form}", expected)
        micro = _MICRO.get(form)
        strategies = ("tensor", "channel", "group", "block") if micro is None else (micro[1],)
        if strategy not in strategies or str(weights.get("actorder")).lower() == "group":
            order = f" ordered by {weights.get('actorder')}" if weights.get("actorder") else ""
            raise unsupported(f"compressed-tensors with scales by {strategy}{order}", expected)
        is_odd = (kind, bits) != ("float", micro[0]) if micro else kind == "float" and (bits != 8 or form == _PACKED)
        if is_odd or not 1 <= bits <= 8 or (micro is not None and not weights.get("symmetric", True)):
            raise unsupported(f"compressed-tensors in {kind} of {bits} bits in the format {form}", expected)
        rows, columns = block.split("x") if isinstance(block, str) else block or (0, 0)
        return cls(
            form,
            bits,
            bool(weights.get("symmetric", True)),
            int(size) if strategy in ("group", "tensor_group") else None,
            (int(rows), int(columns)) if strategy == "block" else None,
            _activations(group.get("input_activations") or {}),
            kind == "float",
            strategy == "tensor" and micro is None,
        )

    @property
    def scaled_block(self) -> tuple[int, int | None]:
        """Rows and columns of a block with one scale; None for all columns."""
        return self.block or (1, self.group)

    def parts(self, name: str, ndim: int, by_block: Dims, zeros: torch.dtype | None) -> dict[str, Part]:
        """The stored tensors of a weight; `by_block`: dims of scales; `zeros`: dtype of zero points; None without."""
        last = ndim - 1
        along, words = DimMap(last), [*_FLOAT8] if self.is_float else [torch.int8, *_FLOAT8]
        if self.form == _PACKED:
            along, words = packed(last, self.bits), [torch.int32]
        elif self.is_packed:
            along, words = DimMap(last, 2), [torch.uint8]
        parts = {
            "values": Part(f"{name}_packed" if self.is_packed else name, (*map(DimMap, range(last)), along), words),
            "scales": Part(f"{name}_scale", by_block, [_MICRO[self.form][2]] if self.is_micro else _FLOATS),
        }
        if zeros is not None:
            is_packed = zeros == torch.int32
            dims = (*by_block[:-2], packed(last - 1, self.bits), by_block[-1]) if is_packed else by_block
            parts["zeros"] = Part(f"{name}_zero_point", dims, [torch.int32 if is_packed else torch.int8])
        if self.form == _NVFP4:
            parts["divisor"] = Part(f"{name}_global_scale", (1,), [torch.float32])
        return parts

    def weight(self, tensors: Tensors, module: str) -> Bundle:
        """Build the weight of `module`. Raises CheckpointError if its stored tensors are inconsistent."""
        name = f"{module}.weight"
        stored = f"{name}_packed" if self.is_packed else name
        if stored not in tensors:
            raise inconsistent(stored, "no such tensor", "one for the group of the config for this module")
        values, zeros = tensors[stored], tensors.get(f"{name}_zero_point")
        needs_zeros = self.is_packed and not self.symmetric  # others are not stored where they are 0
        of_zeros = zeros.dtype if zeros is not None else torch.int32 if needs_zeros else None
        parts = self.parts(name, values.ndim, self._by_block(values.ndim, tensors[f"{name}_scale"].shape), of_zeros)
        scales, shape = parts["scales"].find(tensors).tensor, list(values.shape)
        if self.group is not None:
            shape[-1] = scales.shape[-1] * self.group
        elif self.is_packed:  # the last word of a row may be padded
            shape = stored_tensor(tensors, f"{name}_shape", 1, torch.int64, torch.int32).materialize().tolist()
        # Transformers multiplies float8 weights of experts, which it merges, in float32.
        is_wide = values.dtype.is_floating_point and _EXPERT.search(module)
        dtype = torch.bfloat16 if self.is_micro else torch.float32 if is_wide else scales.dtype
        return bundle(name, tensors, parts, shape, self._decoder(values, scales, dtype, "zeros" in parts), dtype)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if shape[-1] % (self.group or shape[-1]):
            return {}
        by_block = self._by_block(len(shape), (1,) if self.by_tensor else shape)
        zeros = None if self.symmetric else torch.int32 if self.is_packed else torch.int8
        result = described(self.parts(name, len(shape), by_block, zeros).values(), shape, dtype)
        return result | ({f"{name}_shape": torch.tensor(shape)} if self.form == _PACKED else {})

    def _by_block(self, ndim: int, scales: Sequence[int]) -> Dims:
        """Dims of `scales` of that shape, and of zero points."""
        rows, columns = self.scaled_block
        if len(scales) == 1 or (list(scales) == [1] * ndim and (rows, columns) == (1, None)):
            return (1,) * len(scales)
        return (*map(DimMap, range(ndim - 2)), DimMap(ndim - 2, rows), DimMap(ndim - 1, columns) if columns else 1)

    def _decoder(self, values: LazyTensor, scales: LazyTensor, dtype: torch.dtype, has_zeros: bool) -> Decode:
        decode, is_float = partial(_decode, self, dtype), values.dtype.is_floating_point
        if self.is_micro or (is_float and has_zeros):
            return decode
        if is_float:
            block = (None, None) if scales.numel() == 1 else self.scaled_block
            return Float8Values(decode, block, self.activations)
        if self.block is not None or scales.ndim == 1 or (self.is_packed and self.bits not in (4, 8)):
            return decode
        integers, of_groups = partial(_integers, self), partial(_scales_and_zeros, self)
        stored = partial(pack_words, bits=self.bits) if self.is_packed else None
        return Affine(decode, self.bits, self.group, "values", integers, of_groups, stored)


def _activations(settings: Mapping[str, Any]) -> int | None:
    """Return `Float8Values.activations` for the `input_activations` of a group of the config."""
    strategy = settings.get("strategy")
    if settings.get("dynamic") is not True or settings.get("type") != "float" or settings.get("num_bits") != 8:
        return None
    return 0 if strategy == "token" else settings.get("group_size") if strategy == "group" else None


@dataclass(frozen=True)
class Compressed(Format):
    """The schemes of a config, each for its target modules."""

    title = "compressed-tensors"

    schemes: Mapping[str, Scheme | None]
    """Target (name, pattern `re:...` or class of modules) -> scheme; None for a group without quantised weights."""
    ignored: Collection[str] = ()
    """Targets of modules that are not quantised."""
    locate: Locate = lambda module: (module, _LINEAR)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Compressed:
        sparse = (settings.get("sparsity_config") or {}).get("format") or "dense"
        rotated = settings.get("transform_config") or {}
        status = settings.get("quantization_status") or "compressed"
        if sparse != "dense" or rotated.get("config_groups") or status != "compressed":
            kind = f"sparsity ({sparse})" if sparse != "dense" else "transforms" if rotated else f"the status {status}"
            raise unsupported(f"compressed-tensors with {kind}", "compressed weights without sparsity and transforms")
        default = settings.get("format") or "dense"
        schemes: dict[str, Scheme | None] = {}
        for group in (settings.get("config_groups") or {}).values():
            scheme = Scheme.of(group, default) if group.get("weights") else None
            schemes.update(dict.fromkeys(group.get("targets", ()), scheme))
        return cls(schemes, tuple(settings.get("ignore") or ()))

    def located(self, model: PreTrainedModel, locate: Locate) -> Compressed:
        return replace(self, locate=locate)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        scheme = self.scheme(name.removesuffix(".weight"))
        return {} if scheme is None else scheme.stored(name, shape, dtype)

    def read_first(self, tensors: Tensors) -> list[str]:
        needs_shapes = any(scheme and scheme.is_packed and scheme.group is None for scheme in self.schemes.values())
        return [name for name in tensors if needs_shapes and name.endswith(".weight_shape")]

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        result: dict[str, LazyTensor] = {}
        scales = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if kind in ("weight", "weight_packed") and module in scales:
                scheme = self.scheme(module)
                if scheme is None:
                    raise inconsistent(f"{module}.weight", "no group of the config for it", "one")
                result[f"{module}.weight"] = scheme.weight(tensors, module)
            elif kind == "weight_packed":
                raise inconsistent(f"{module}.weight_scale", "no such tensor", f"one for {name}")
            elif not (module in scales and kind.startswith("weight_")):
                result[name] = tensor
        read = {name for tensor in result.values() for name in stored_names(tensor)}
        for name in tensors.keys() - result.keys() - read:
            if not name.endswith(".weight_shape"):
                raise inconsistent(name, "a tensor that the group of its module does not read", "none")
        return result

    def scheme(self, module: str) -> Scheme | None:
        """Find the scheme of a module in the checkpoint, by either of its names before its class."""
        name, owner = self.locate(module)
        owner = owner if isinstance(owner, nn.Linear | nn.Embedding) else _LINEAR
        names = dict.fromkeys((name, module))
        if any(match_targets(each, owner, self.ignored) for each in names):
            return None
        found = [target for each in names for target in match_targets(each, owner, self.schemes)[:1]]
        by_name = [target for target in found if target.startswith("re:") or target in names]
        return self.schemes[(by_name or found)[0]] if found else None


def match_targets(name: str, module: nn.Module, targets: Collection[str]) -> list[str]:
    """The `targets` of a module in the order of compressed-tensors: its name, patterns, its classes; by alphabet."""
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    named = [each for each in ordered if each == name or (each.startswith("re:") and re.match(each[3:], name))]
    classes = {cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    return [*named, *(each for each in ordered if each in classes and each not in named)]


def _decode(scheme: Scheme, dtype: torch.dtype, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """Decode in float32, rounded to `dtype`: the bits of the library, which computes in `dtype`."""
    values = stored["values"]
    if values.dtype == torch.uint8:
        values = unpack_fp4(values)
    else:
        values = from_float8(values) if values.is_floating_point() else _integers(scheme, stored, shape).float()
    scales, zeros = (_micro_scales(stored), 0) if scheme.is_micro else _scales_and_zeros(scheme, stored, shape)
    if isinstance(zeros, torch.Tensor):
        subtract_blocks(values, zeros, scheme.scaled_block)
    elif zeros:
        values.sub_(zeros)
    return multiply_blocks(values, scales, scheme.scaled_block).to(dtype)


def _micro_scales(stored: StoredValues) -> torch.Tensor:
    """Scales of a micro-scaling format: exponents, or float8 with a divisor of all."""
    scales = stored["scales"]
    scales = 2.0 ** (scales.int() - 127) if scales.dtype == torch.uint8 else scales.float()
    return scales / stored["divisor"] if "divisor" in stored else scales


def _integers(scheme: Scheme, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """Values as stored: float8, int8, or unsigned if they are packed."""
    return unpack(stored["values"], scheme.bits, shape[-1]) if scheme.is_packed else stored["values"]


def _scales_and_zeros(
    scheme: Scheme, stored: StoredValues, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Scales, and zero points in the units of `_integers`."""
    offset = 1 << (scheme.bits - 1)
    if "zeros" not in stored:
        return stored["scales"], offset if scheme.is_packed else 0
    zeros = stored["zeros"]
    if zeros.dtype == torch.int32:
        zeros = unpack(zeros.mT, scheme.bits, shape[-2]).mT.to(torch.int16)
        return stored["scales"], zeros if scheme.is_packed else zeros - offset
    return stored["scales"], zeros.to(torch.int16) + offset if scheme.is_packed else zeros
