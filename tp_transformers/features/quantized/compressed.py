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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...slices.lazy import LazyTensor
from .affine import Affine, pack_words
from .bundle import Bundle, Component, Decode, DimMap, StoredValues
from .casts import from_float8
from .float8 import Float8Values
from .format import (
    FP4,
    Format,
    Locate,
    Tensors,
    bundle,
    constant,
    inconsistent,
    multiply_blocks,
    packed,
    pair_table,
    stored_names,
    stored_tensor,
    subtract_blocks,
    unpack,
    unpack_pairs,
    unsupported,
    without_values,
)

_PACKED = "pack-quantized"
_MICRO = {
    "nvfp4-pack-quantized": (4, "tensor_group", torch.float8_e4m3fn),
    "mxfp4-pack-quantized": (4, "group", torch.uint8),
    "mxfp8-quantized": (8, "group", torch.uint8),
}
"""Micro-scaling formats (small groups): bits, strategy and dtype of the scales."""
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized", *_MICRO)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = pair_table(FP4)
_EXPERT = re.compile(r"\.experts\.\d+\.")


_LINEAR = nn.Linear(1, 1, device="meta")


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a `config_groups` entry."""

    is_packed: bool
    bits: int
    symmetric: bool
    group: int | None
    """Columns that share a scale; None for all."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for one scale per row or per tensor."""
    micro: str | None = None
    """Name of a micro-scaling format; None for other formats."""
    activations: int | None = None
    """See `Float8Values.activations`."""
    is_float: bool = False
    by_tensor: bool = False
    """True if all rows and columns share a scale."""

    @property
    def along(self) -> DimMap:
        """The `DimMap` of the last dim of the values, with `dim` 0 as a placeholder."""
        if self.micro is not None:
            return DimMap(0, 8 // self.bits)
        return packed(0, self.bits) if self.is_packed else DimMap(0)

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
            form == _PACKED or (form in _MICRO and bits == 4),
            bits,
            bool(weights.get("symmetric", True)),
            int(size) if strategy in ("group", "tensor_group") else None,
            (int(rows), int(columns)) if strategy == "block" else None,
            form if micro is not None else None,
            _activations(group.get("input_activations") or {}),
            kind == "float",
            strategy == "tensor",
        )

    @property
    def scaled_block(self) -> tuple[int, int | None]:
        """Rows and columns of a block with one scale; None for all columns."""
        return self.block or (1, self.group)

    def weight(self, tensors: Tensors, module: str, stored: str | None = None) -> Bundle:
        """Build the weight of `module`, whose values are the tensor `stored`.

        Raises CheckpointError if its stored tensors are inconsistent.
        """
        name = f"{module}.weight"
        stored = stored or (f"{name}_packed" if self.is_packed else name)
        if stored not in tensors:
            raise inconsistent(stored, "no such tensor", "one for the group of the config for this module")
        values = tensors[stored]
        *lead, rows, _ = values.shape
        ndim = values.ndim
        scales = self._scales(tensors, f"{name}_scale", ndim)
        columns = self._columns(tensors, name, values, scales)
        shape = (*lead, rows, columns)
        own = tuple(map(DimMap, range(ndim - 1)))
        along = replace(self.along, dim=ndim - 1)
        by_block = self._by_block(ndim, scales)
        components = {
            "values": Component(values, (*own, along), stored),
            "scales": Component(scales, by_block, f"{name}_scale"),
        }
        if f"{name}_zero_point" in tensors or (self.is_packed and not self.symmetric):  # zeros are not stored
            zeros = stored_tensor(tensors, f"{name}_zero_point", ndim, torch.int32, torch.int8)
            is_packed = zeros.dtype == torch.int32
            dim_maps = (*by_block[:-2], packed(ndim - 2, self.bits), by_block[-1]) if is_packed else by_block
            components["zeros"] = Component(zeros, dim_maps, f"{name}_zero_point")
        if f"{name}_scale_2" in tensors:  # of ModelOpt
            factor = stored_tensor(tensors, f"{name}_scale_2", 0, torch.float32)
            components["factor"] = Component(factor, (), f"{name}_scale_2")
        elif self.micro is not None and _MICRO[self.micro][1] == "tensor_group":
            divisor = stored_tensor(tensors, f"{name}_global_scale", 1, torch.float32)
            components["divisor"] = Component(divisor, (None,), f"{name}_global_scale")
        # Transformers multiplies float8 weights of experts, which it merges, in float32.
        is_wide = values.dtype.is_floating_point and _EXPERT.search(module)
        dtype = torch.bfloat16 if self.micro is not None else torch.float32 if is_wide else scales.dtype
        decoder = self._decoder(values, scales, dtype, has_zeros="zeros" in components)
        return bundle(name, components, shape, dtype, decoder)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        *lead, rows, columns = shape
        if columns % (self.group or columns):
            return {}
        per_byte = self.micro is not None and self.is_packed
        words = torch.uint8 if per_byte else torch.int32 if self.is_packed else torch.int8
        words = torch.float8_e4m3fn if self.is_float and not self.is_packed else words
        width = -(-columns * self.bits // (8 * words.itemsize)) if self.is_packed else columns
        high, wide = self.scaled_block
        counts = (-(-rows // high), -(-columns // (wide or columns)))
        scales = dtype if self.micro is None else _MICRO[self.micro][2]
        by_tensor = self.by_tensor and self.micro is None
        result = {
            f"{name}_packed" if self.is_packed else name: without_values(words, *lead, rows, width),
            f"{name}_scale": without_values(scales, *((1,) if by_tensor else (*lead, *counts))),
        }
        if self.is_packed and self.micro is None:
            result[f"{name}_shape"] = torch.tensor(shape)
        if not self.symmetric:
            zeros = without_values(torch.int8, *lead, *counts)
            if self.is_packed:
                zeros = without_values(torch.int32, *lead, -(-rows * self.bits // 32), counts[1])
            result[f"{name}_zero_point"] = zeros
        if self.micro is not None and _MICRO[self.micro][1] == "tensor_group":
            result[f"{name}_global_scale"] = without_values(torch.float32, 1)
        return result

    def _decoder(self, values: LazyTensor, scales: LazyTensor, dtype: torch.dtype, *, has_zeros: bool) -> Decode:
        decode, is_integer = partial(_decode, self, dtype), self.micro is None and not values.dtype.is_floating_point
        if self.micro is None and values.dtype.is_floating_point and not has_zeros:
            block = (None, None) if scales.numel() == 1 else self.scaled_block
            return Float8Values(decode, block, self.activations)
        if not is_integer or self.block is not None or scales.ndim == 1 or (self.is_packed and self.bits not in (4, 8)):
            return decode
        integers, of_groups = partial(_integers, self), partial(_scales_and_zeros, self)
        stored = partial(pack_words, bits=self.bits) if self.is_packed else None
        return Affine(decode, self.bits, self.group, "values", integers, of_groups, stored)

    def _scales(self, tensors: Tensors, name: str, ndim: int) -> LazyTensor:
        scales = tensors.get(name)
        dtypes = _FLOATS if self.micro is None else (_MICRO[self.micro][2],)
        return stored_tensor(tensors, name, 1 if scales is not None and scales.ndim == 1 else ndim, *dtypes)

    def _columns(self, tensors: Tensors, name: str, values: LazyTensor, scales: LazyTensor) -> int:
        """Count the columns of the weight; the last word of a row may be padded."""
        stored = values.shape[-1]
        if self.group is not None:
            columns = scales.shape[-1] * self.group
        elif not self.is_packed:
            return stored
        else:
            full_shape = stored_tensor(tensors, f"{name}_shape", 1, torch.int64, torch.int32).materialize().tolist()
            columns = int(full_shape[-1]) if full_shape[:-1] == list(values.shape[:-1]) else -1
        if self.along.stored_length(columns) != stored:
            got = f"{scales.shape[-1]} groups of {self.group} columns" if self.group else f"the shape {full_shape}"
            raise inconsistent(name, f"{got}, and values of shape {tuple(values.shape)}", "those of one weight")
        return columns

    def _by_block(self, ndim: int, scales: LazyTensor) -> tuple[DimMap | None, ...]:
        """Build the `DimMap`s of scales and zero points."""
        if scales.ndim == 1:
            return (None,)
        lead = tuple(map(DimMap, range(ndim - 2)))
        if self.block is not None:
            return (*lead, DimMap(ndim - 2, self.block[0]), DimMap(ndim - 1, self.block[1]))
        if scales.numel() == 1:
            return (None,) * ndim
        return (*lead, DimMap(ndim - 2), None if self.group is None else DimMap(ndim - 1, self.group))


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

    def dequantized(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
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
        match = library_matches() if len(self.schemes) > 1 else match_targets
        found = [target for each in names for target in match(each, owner, self.schemes)[:1]]
        by_name = [target for target in found if target.startswith("re:") or target in names]
        return self.schemes[(by_name or found)[0]] if found else None


def match_targets(name: str, module: nn.Module, targets: Collection[str]) -> list[str]:
    """The `targets` of a module in the order of compressed-tensors: its name, patterns, its classes; by alphabet."""
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    named = [each for each in ordered if each == name or (each.startswith("re:") and re.match(each[3:], name))]
    classes = {cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    return [*named, *(each for each in ordered if each in classes and each not in named)]


@cache
def library_matches() -> Callable[[str, nn.Module, Collection[str]], list[str]]:
    """`match_targets` of compressed-tensors if it is installed, else ours."""
    try:
        from compressed_tensors.utils.match import match_targets as match  # type: ignore[import-not-found]
    except ImportError:
        return match_targets
    return match  # type: ignore[no-any-return]


def _decode(scheme: Scheme, dtype: torch.dtype, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """Decode in float32, rounded to `dtype`: the bits of the library, which computes in `dtype`."""
    values = stored["values"]
    if scheme.micro is not None and scheme.bits == 4:
        values = unpack_pairs(values, constant(_PAIRS, values.device))
    else:
        values = from_float8(values) if values.is_floating_point() else _integers(scheme, stored, shape).float()
    scales, zeros = (_micro_scales(stored), 0) if scheme.micro else _scales_and_zeros(scheme, stored, shape)
    if isinstance(zeros, torch.Tensor):
        subtract_blocks(values, zeros, scheme.scaled_block)
    elif zeros:
        values.sub_(zeros)
    return multiply_blocks(values, scales, scheme.scaled_block).to(dtype)


def _micro_scales(stored: StoredValues) -> torch.Tensor:
    """Scales of a micro-scaling format: exponents, or float8 with a divisor or a factor of all."""
    scales = stored["scales"]
    scales = 2.0 ** (scales.int() - 127) if scales.dtype == torch.uint8 else scales.float()
    return scales / stored["divisor"] if "divisor" in stored else scales * stored.get("factor", 1)


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
