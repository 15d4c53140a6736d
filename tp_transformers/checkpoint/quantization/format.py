"""The contract of a quantised format, and the code that formats share: names of members, errors, packed integers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import CheckpointError, UnsupportedError
from ...slices.bundle import Bundle, Cut, Decode, Member
from ...slices.composed import Transpose
from ...slices.lazy import LazyTensor

Tensors = Mapping[str, LazyTensor]
"""Tensors of a checkpoint, by name."""


class Format(ABC):
    """A format of quantised weights, as the config of one checkpoint describes it."""

    title: ClassVar[str]
    """Name in messages."""

    @classmethod
    @abstractmethod
    def of(cls, settings: Mapping[str, Any]) -> Format:
        """The format that a config's `settings` mean. Raises UnsupportedError on those that are not known."""

    @abstractmethod
    def expressed(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        """The checkpoint's tensors in floating point; those that are not quantised stay as they are.

        `stays_packed`: whether their members are to stay in memory as they are, so that each has to be a `Bundle`.
        Raises CheckpointError where a member of a quantised tensor is missing, or does not fit the others.
        """

    def read_first(self, tensors: Tensors) -> list[str]:
        """Names of the tensors with values that decide how others are cut."""
        return []

    def published(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The complete `tensor` of a checkpoint in the shape that checkpoints have it in."""
        return tensor


@dataclass(frozen=True)
class Quantization:
    """The entries of a model's config about quantisation."""

    format: Format
    settings: Mapping[str, Any]
    part: str | None = None
    """The config in the config that says it; None for the model's own."""

    def put_into(self, config: Any) -> None:
        """Let a `config` say it."""
        of_part = config if self.part is None else getattr(config, self.part)
        of_part.quantization_config = dict(self.settings)


def member_names(tensor: LazyTensor) -> list[str]:
    """The names of the stored tensors that a quantised one stands for; none for any other."""
    while isinstance(tensor, Transpose):
        tensor = tensor.source
    return [member.name for member in tensor.members.values()] if isinstance(tensor, Bundle) else []


def bundle(
    name: str, members: Mapping[str, Member], shape: Sequence[int], dtype: torch.dtype, decode: Decode
) -> Bundle:
    """The tensor `name`, of its members. Raises CheckpointError where one does not fit."""
    try:
        return Bundle(members, shape, dtype, decode)
    except ValueError as error:
        raise unfit(name, str(error), f"members of a tensor of shape {tuple(shape)}") from None


def member(tensors: Tensors, name: str, ndim: int, *dtypes: torch.dtype) -> LazyTensor:
    """The tensor `name`. Raises CheckpointError where it is missing, or of other dims or dtypes."""
    tensor = tensors.get(name)
    if tensor is None:
        raise unfit(name, "no such tensor", "one for the others of its weight")
    if tensor.ndim != ndim or tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise unfit(name, f"{tensor.dtype} of shape {tuple(tensor.shape)}", f"{expected} of {ndim} dims")
    return tensor


def dequantized_modules(
    tensors: Tensors, kinds: Collection[str], weight: Callable[[Tensors, str], LazyTensor]
) -> dict[str, LazyTensor]:
    """The tensors, with a `weight` in place of each `qweight` and of the members of those `kinds` beside it."""
    modules = quantized_modules(tensors)
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            result[f"{module}.weight"] = weight(tensors, module)
        elif module not in modules or kind not in kinds:
            result[name] = tensor
    return result


def quantized_modules(tensors: Tensors) -> set[str]:
    """The modules that have a `qweight`."""
    return {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}


def count_groups(module: str, columns: int, group: int | None, scales: LazyTensor, zeros: LazyTensor) -> int:
    """Groups of `columns` input features. Raises CheckpointError where scales or zero points are not as many."""
    count = -(-columns // (group or columns))
    if not len(scales) == len(zeros) == count:
        got = f"{len(scales)} groups of scales and {len(zeros)} of zero points"
        raise unfit(f"{module}.scales", got, f"{count}, of {group} of {columns} features each")
    return count


def unfit(name: str, got: str, expected: str) -> CheckpointError:
    """The error of a tensor that does not fit the config."""
    fix = "Download the checkpoint again; if it is whole, its config's quantization_config does not describe it."
    return CheckpointError(f"tensor {name}", got=got, expected=expected, fix=fix)


def refused(got: str, expected: str, fix: str | None = None) -> UnsupportedError:
    """The error of a checkpoint in a variant of a format that is not known."""
    fix = fix or "Choose such a checkpoint of the model, or load this one without tp_plan."
    return UnsupportedError("tp_plan", got=f"a checkpoint quantised with {got}", expected=expected, fix=fix)


def packed(dim: int, bits: int) -> Cut:
    """The cut of a dim that has values of `bits` side by side in words of 32 bits."""
    common = math.gcd(bits, 32)
    return Cut(dim, 32 // common, bits // common)


def unpack(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """(..., words) int32 -> (..., length) uint8: the value i of a row stands from bit i * `bits` on."""
    words = words.contiguous()
    if bits == 8:
        values = words.view(torch.uint8)
    elif bits == 4:
        both = words.view(torch.uint8)
        values = torch.stack((both & 0xF, both >> 4), -1).flatten(-2)
    else:
        wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
        first = torch.arange(length, device=words.device) * bits
        pairs = wide[..., first // 32] | wide[..., first // 32 + 1] << 32
        values = ((pairs >> first % 32) & ((1 << bits) - 1)).to(torch.uint8)
    return values[..., :length]
