"""The interface of a quantised format, and code that formats share: checks, errors, packed integers, blocks."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import CheckpointError, UnsupportedError
from ...slices.composed import Transpose
from ...slices.lazy import LazyTensor
from .bundle import Bundle, Component, Decode, DimMap, Dims, stored_shape

Tensors = Mapping[str, LazyTensor]
"""Tensors of a checkpoint, by name."""
Shapes = Mapping[str, torch.Size]
"""Full shapes of a model's parameters and buffers, by name."""
Locate = Callable[[str], tuple[str, nn.Module]]
"""Name of a module in the checkpoint -> its name and the module in the model; a linear for one that is not there."""
_OF_ACTIVATIONS = re.compile(r"\.((input|output|q|k|v|kv)_(scale|zero_point|global_scale)|activation_scale)$")


class Format(ABC):
    """A format of quantised weights, with the settings of one checkpoint's config."""

    title: ClassVar[str]
    """Name in error messages."""
    is_packable: ClassVar[bool] = True
    """True if each quantised tensor is a `Bundle`, whose stored tensors can stay in memory."""
    is_written: ClassVar[bool] = True
    """True if packed weights can be saved."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Format:
        """Parse a config's `settings`. Raises UnsupportedError on unknown settings."""
        return cls()

    @abstractmethod
    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        """Map the checkpoint's tensors to lazy tensors in floating point; tensors that are not quantised are unchanged.

        Raises CheckpointError if a stored tensor of a quantised weight is missing or inconsistent with the others.
        """

    def located(self, model: PreTrainedModel, locate: Locate) -> Format:
        """The format with the modules of a model, for one whose settings name classes."""
        return self

    def stored(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint has in place of the weight `name`, for a config without a checkpoint.

        They are on the meta device, unless others depend on their values. Empty if the weight is not quantised, or if
        the settings do not tell. `dtype`: that of the model.
        """
        return {}

    def named(self, model: PreTrainedModel, tensors: Tensors, shapes: Shapes) -> tuple[Tensors, Sequence[Any]] | None:
        """The tensors by their names in `model`, and transformers' conversions to apply to them.

        None if the checkpoint has transformers' names. `shapes`: those of the model's parameters. Raises
        UnsupportedError if the format has no names for the model.
        """
        return None

    def read_first(self, tensors: Tensors) -> list[str]:
        """Name the tensors whose values determine how others are sliced; they are read first."""
        return []

    def as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reshape the full `tensor` to the shape that checkpoints store."""
        return tensor


def of_weights(tensors: Tensors, names: Collection[str]) -> dict[str, LazyTensor]:
    """Leave out scales of activations and of the KV cache, unless they are among `names`, those of the model.

    No weight depends on them: activations stay in floating point.
    """
    return {name: tensor for name, tensor in tensors.items() if name in names or not _OF_ACTIVATIONS.search(name)}


def stored_names(tensor: LazyTensor) -> list[str]:
    """List the stored tensors of a quantised tensor; empty if it is not quantised."""
    while isinstance(tensor, Transpose):
        tensor = tensor.source
    return [component.name for component in tensor.components.values()] if isinstance(tensor, Bundle) else []


@dataclass(frozen=True)
class Part:
    """One of the stored tensors of a weight: its name in a checkpoint, its dims, and the dtypes that it may have."""

    name: str
    dims: Dims
    dtypes: Sequence[torch.dtype]

    def find(self, tensors: Tensors) -> Component:
        """The tensor of a checkpoint. Raises CheckpointError if it is missing or has other dims or dtypes."""
        return Component(stored_tensor(tensors, self.name, len(self.dims), *self.dtypes), self.dims, self.name)


def described(parts: Iterable[Part], shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The stored tensors of a weight of `shape`, on the meta device; of `dtype`, that of the model, if they may be."""
    return {
        part.name: without_values(dtype if dtype in part.dtypes else part.dtypes[0], *stored_shape(part.dims, shape))
        for part in parts
    }


def bundle(
    name: str,
    tensors: Tensors,
    parts: Mapping[str, Part | Component],
    shape: Sequence[int],
    decode: Decode,
    dtype: torch.dtype | None = None,
) -> Bundle:
    """Build the tensor `name` from its stored tensors; `dtype`: that of its `scales` unless given.

    Raises CheckpointError if a stored tensor is missing, or has another shape or dtype.
    """
    components = {key: part.find(tensors) if isinstance(part, Part) else part for key, part in parts.items()}
    try:
        return Bundle(components, shape, dtype or components["scales"].tensor.dtype, decode)
    except ValueError as error:
        raise inconsistent(name, str(error), f"components of a tensor of shape {tuple(shape)}") from None


def stored_tensor(tensors: Tensors, name: str, ndim: int, *dtypes: torch.dtype) -> LazyTensor:
    """Look up the stored tensor `name`. Raises CheckpointError if it is missing or has other dims or dtypes."""
    tensor = tensors.get(name)
    if tensor is None:
        raise inconsistent(name, "no such tensor", "one for the others of its weight")
    if tensor.ndim != ndim or tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise inconsistent(name, f"{tensor.dtype} of shape {tuple(tensor.shape)}", f"{expected} of {ndim} dims")
    return tensor


def without_values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def inconsistent(name: str, got: str, expected: str) -> CheckpointError:
    """Build the error for a tensor that is inconsistent with the config."""
    fix = "Download the checkpoint again; if it is complete, its config's quantization_config does not describe it."
    return CheckpointError(f"tensor {name}", got=got, expected=expected, fix=fix)


def unsupported(got: str, expected: str, fix: str | None = None) -> UnsupportedError:
    """Build the error for a checkpoint in an unsupported format or variant."""
    fix = fix or "Choose such a checkpoint of the model, or load this one without tp_plan."
    return UnsupportedError("tp_plan", got=f"a checkpoint quantised with {got}", expected=expected, fix=fix)


def refuse_other(method: str) -> UnsupportedError:
    """Build the error for a request to quantise a quantised checkpoint by another `method`."""
    return UnsupportedError(
        "from_pretrained",
        got=f"tp_plan with quantization_config for {method}",
        expected="weights in floating point",
        fix="Leave out quantization_config: quantised weights are dequantised; others only torchao quantises.",
    )


_SCALES = re.compile(r"scale|zero|absmax|g_idx|SCB")
_ENCODED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32)


def check_read(tensors: Tensors, unread: Mapping[str, Collection[str]], missing: Collection[str]) -> None:
    """Raise UnsupportedError if a load would leave out scales, zero points or indices of a quantised weight.

    `tensors`: of the checkpoint, once dequantised. `unread`: those that the model does not have, with their names in
    the model. `missing`: parameters that the checkpoint does not have.
    """
    left = {_owner(name): name for name in unread if _SCALES.search(name.rpartition(".")[2])}
    if not left:
        return
    lacking = {_owner(name) for name in missing}
    for name, tensor in tensors.items():
        scales = left.get(name) or left.get(_owner(name))
        is_encoded = tensor.dtype in _ENCODED or bool(stored_names(tensor))
        if scales is None or not is_encoded or (name in unread and _SCALES.search(name.rpartition(".")[2])):
            continue
        if name not in unread or any(owners(each) & lacking for each in unread[name]):
            raise UnsupportedError(
                "tp_plan",
                got=f"a checkpoint in which {name} is quantised, with {scales} beside it, which nothing would read",
                expected="a quantization_config in its config.json that says how to read both",
                fix="Add the one of its format, or choose a checkpoint in floating point.",
            )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def owners(name: str) -> set[str]:
    """Names of the modules that a parameter or a module `name` is in."""
    parts = name.split(".")[:-1]
    return {".".join(parts[: index + 1]) for index in range(len(parts))}


def packed(dim: int, bits: int) -> DimMap:
    """Return the `DimMap` of a dim whose values of `bits` are packed contiguously in 32-bit words."""
    common = math.gcd(bits, 32)
    return DimMap(dim, 32 // common, bits // common)


def unpack(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """Unpack (..., words) int32 to (..., length) uint8: value i of a row starts at bit i * `bits`."""
    # A dim of length 1 may have any stride in a contiguous tensor.
    words = words.contiguous() if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
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


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of FP4 (E2M1), by their bits."""


def pair_table(values: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Byte -> the float32 `values` (16) of its halves, low half first, as one int64: one lookup gives both."""
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack((high, low) if high_first else (low, high), -1).view(torch.int64).flatten()


_FP4_PAIRS = pair_table(FP4)


@cache
def constant(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table of the package on a device, copied there once: the host waits for each copy to a GPU."""
    return values.to(device)


def unpack_pairs(pairs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up the bytes (..., n) in a `pair_table`: (..., 2 n) float32."""
    values = table.index_select(0, pairs.flatten().int()).view(torch.float32)
    return values.view(*pairs.shape[:-1], -1)


def unpack_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """Look up bytes (..., n) of two values of FP4, the first in the low half: (..., 2 n) float32."""
    return unpack_pairs(pairs, constant(_FP4_PAIRS, pairs.device))


def multiply_blocks(values: torch.Tensor, scales: torch.Tensor, block: Sequence[int | None]) -> torch.Tensor:
    """Multiply contiguous float32 `values` in place by one scale for each block; returns them.

    `block`: its lengths in the last dims, None for the full length; 1 in all others.
    """
    blocks, scales = _by_blocks(values, scales.to(torch.float32), block)
    blocks.mul_(scales)
    return values


def subtract_blocks(values: torch.Tensor, zeros: torch.Tensor, block: Sequence[int | None]) -> torch.Tensor:
    """Subtract one zero point for each block, as `multiply_blocks`."""
    blocks, zeros = _by_blocks(values, zeros.to(torch.float32), block)
    blocks.sub_(zeros)
    return values


def _by_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of values and scales that broadcast; scales of an incomplete last block are repeated."""
    if scales.numel() == 1:
        return values, scales.flatten()
    block = (*(1 for _ in values.shape[len(block) :]), *block)
    sizes = [min(size or length, length) for size, length in zip(block, values.shape, strict=True)]
    if all(length % size == 0 for size, length in zip(sizes, values.shape, strict=True)):
        counts = [length // size for size, length in zip(sizes, values.shape, strict=True)]
        values = values.view([each for pair in zip(counts, sizes, strict=True) for each in pair])
        return values, scales.reshape([each for count in scales.shape for each in (count, 1)])
    for dim, size in enumerate(block):
        if size is not None:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return values, scales
