"""GPTQ: integers packed along the input features, with a scale and a zero point for every group of them.

X.qweight  (in * bits / 32, out) int32
X.qzeros   (groups, out * bits / 32) int32; stored minus 1 in the first version of the format
X.scales   (groups, out)
X.g_idx    (in) int32: the group of every input feature, whatever `desc_act` says; consecutive without it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...slices.lazy import LazyTensor, Resident
from .affine import Affine, by_groups, pack_words
from .bundle import Bundle, Component, Decode, DimMap, StoredValues
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

_BITS = (2, 3, 4, 8)
_VERSIONS = ("gptq", "gptq_v2")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Gptq(Format):
    """Every weight that has a `qweight`."""

    title = "GPTQ"

    bits: int
    group: int | None
    """Input features that share a scale; None for all."""
    ordered: bool
    """True if there must be a `g_idx` (`desc_act`). Unless its groups are consecutive, any rank may need any group."""
    less_one: bool
    """True if zero points are stored minus 1."""
    rules: tuple[tuple[re.Pattern[str], Gptq], ...] = ()
    """(pattern of module names, their settings), `dynamic` in a config; the first match applies."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gptq:
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        words = str(settings.get("pack_dtype") or "int32").removeprefix("torch.")
        if bits not in _BITS or version not in _VERSIONS or words != "int32":
            expected = f"one of {', '.join(map(str, _BITS))} bits, in the version {' or '.join(_VERSIONS)}"
            raise unsupported(f"GPTQ in {bits} bits, in the version {version}, in words of {words}", expected)
        rules = []
        for key, changes in (settings.get("dynamic") or {}).items():
            if not key.startswith("-:"):  # "-:" excludes modules from quantisation
                try:
                    pattern = re.compile(key.removeprefix("+:"))
                except re.error as error:
                    raise unsupported(
                        f"GPTQ with settings for {key!r} ({error})", "settings for regular expressions"
                    ) from None
                rules.append((pattern, cls.of({**settings, **changes, "dynamic": None})))
        return cls(bits, None if group < 1 else group, bool(settings.get("desc_act")), version == "gptq", tuple(rules))

    def of_module(self, module: str) -> Gptq:
        """Return the settings of one module."""
        return next((settings for pattern, settings in self.rules if pattern.match(module)), self)

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        module, form = name.removesuffix(".weight"), self.of_module(name.removesuffix(".weight"))
        size = form.group or shape[-1]
        columns = torch.arange(shape[-1], dtype=torch.int32)
        group_of = columns % -(-shape[-1] // size) if form.ordered else columns // size
        result = stored_words(module, shape, dtype, form.bits, form.group, packed_dim=0)
        return result and {**result, f"{module}.g_idx": group_of}

    def read_first(self, tensors: Tensors) -> list[str]:
        return [name for name in tensors if name.endswith(".g_idx")]

    def dequantized(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        modules = quantized_modules(tensors)
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind in ("qzeros", "g_idx") and module not in modules:
                raise inconsistent(f"{module}.qweight", "no such tensor", f"one for {name}")

        def weight(tensors: Tensors, module: str) -> Bundle:
            return self.of_module(module)._weight(tensors, module, stays_packed=stays_packed)

        return dequantized_modules(tensors, ("qzeros", "scales", "g_idx"), weight)

    def _weight(self, tensors: Tensors, module: str, *, stays_packed: bool) -> Bundle:
        words = stored_tensor(tensors, f"{module}.qweight", 2, torch.int32)
        scales = stored_tensor(tensors, f"{module}.scales", 2, *_FLOATS)
        zeros = stored_tensor(tensors, f"{module}.qzeros", 2, torch.int32)
        rows, columns, is_ordered = words.shape[1], words.shape[0] * 32 // self.bits, self.ordered
        if f"{module}.g_idx" in tensors or self.ordered:
            order = stored_tensor(tensors, f"{module}.g_idx", 1, torch.int32, torch.int64)
            columns = len(order)
        if f"{module}.g_idx" in tensors and isinstance(order, Resident):  # not if only headers are read
            is_ordered = not torch.equal(order.tensor, torch.arange(columns).to(order.dtype) // (self.group or columns))
        groups = None if self.group is None or is_ordered else DimMap(1, self.group)
        components = {
            "words": Component(words, (packed(1, self.bits), DimMap(0)), f"{module}.qweight"),
            "scales": Component(scales, (groups, DimMap(0)), f"{module}.scales"),
            "zeros": Component(zeros, (groups, packed(0, self.bits)), f"{module}.qzeros"),
        }
        count = count_groups(module, columns, self.group, scales, zeros)
        if is_ordered and isinstance(order, Resident) and not 0 <= order.tensor.min() <= order.tensor.max() < count:
            got = f"groups from {int(order.tensor.min())} to {int(order.tensor.max())}"
            raise inconsistent(f"{module}.g_idx", got, f"those from 0 to {count - 1}")
        if is_ordered or (stays_packed and f"{module}.g_idx" in tensors):  # for a save
            components["order"] = Component(order, (DimMap(1),), f"{module}.g_idx")
        form = replace(self, ordered=is_ordered)
        decode: Decode = partial(_decode, form)
        if self.bits == 4 and not is_ordered:
            integers, of_groups = partial(_integers, form), partial(_scales, form)
            decode = Affine(decode, self.bits, self.group, "words", integers, of_groups, _words)
        return bundle(f"{module}.weight", components, (rows, columns), scales.dtype, decode)


def _decode(form: Gptq, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    scales, offsets = _scales(form, stored, shape)
    if form.ordered:  # every column names its group
        group_of = stored["order"].long()
        scales, offsets = scales[:, group_of], offsets[:, group_of]
    return by_groups(_integers(form, stored, shape), scales, offsets, 1 if form.ordered else form.group)


def _integers(form: Gptq, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    return unpack(stored["words"].t(), form.bits, shape[1])


def _scales(form: Gptq, stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = stored["zeros"]
    if form.less_one and form.bits != 3:  # add 1 to all packed values; an overflow carries into the next value
        zeros = zeros + sum(1 << bit for bit in range(0, 31, form.bits))
    offsets = unpack(zeros, form.bits, shape[0]).t()
    return stored["scales"].t(), (offsets + 1) & 7 if form.less_one and form.bits == 3 else offsets


def _words(values: torch.Tensor) -> torch.Tensor:
    return pack_words(values, 4).t().contiguous()
