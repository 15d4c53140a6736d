"""Weights that stay quantised in memory; `model/packed_forward.py` decodes them for the forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...errors import UnsupportedError
from ...marks import Mark
from ...slices.bundle import Decoded
from ...slices.lazy import LazyTensor
from ...slices.stored import Stored


class HeldWeight(Protocol):
    """A rank's shard of a weight in quantised form."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded weight."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def decoded(self) -> torch.Tensor:
        """Decode to a contiguous tensor."""


@dataclass(frozen=True)
class PackedWeight:
    """The stored tensors of a rank's shard of `shape`; `dtype` and `device` are those of the decoded weight."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    places: Sequence[tuple[Decoded, tuple[int, ...], tuple[int, ...], int]]
    """(stored tensors, size, strides, offset): each entry decodes to a strided view of the weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors in memory."""
        return sum(tensor.nbytes for decoded, *_ in self.places for tensor in decoded.parts.values())

    def decoded(self) -> torch.Tensor:
        """Decode to a contiguous tensor."""
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for decoded, size, stride, offset in self.places:
            decoded.fill(weight.as_strided(size, stride, offset))
        return weight


def pack(
    shard: LazyTensor, dtype: torch.dtype, device: torch.device
) -> tuple[PackedWeight, list[tuple[Stored, torch.Tensor]]] | None:
    """Create a packed weight and the reads that fill it; None if a part of it is not quantised."""
    full = torch.empty(shard.shape, dtype=dtype, device=device)  # only for strides and offsets of views
    places, reads = [], []
    for source, view in shard.pieces(full):
        if isinstance(source, Decoded):
            places.append((source, tuple(view.shape), tuple(view.stride()), int(view.storage_offset())))
        elif view.untyped_storage()._cdata == full.untyped_storage()._cdata:
            return None
        elif isinstance(source, Stored):
            reads.append((source, view))
        else:
            source.fill(view)
    if not places or math.prod(shard.shape) == 0:
        return None
    return PackedWeight(shard.shape, dtype, device, places), reads


PACKED: Mark[dict[str, HeldWeight]] = Mark("tp_packed")
"""The packed weights of a module, by parameter name."""


def packed_weights(model: nn.Module) -> Mapping[str, HeldWeight]:
    """Return the packed weights of a model, by parameter name."""
    return {
        f"{prefix}.{name}".lstrip("."): weight
        for prefix, module in model.named_modules()
        for name, weight in (PACKED.find(module) or {}).items()
    }


def check_not_packed(model: nn.Module, subject: str) -> None:
    """Raise UnsupportedError if the model has packed weights, since `subject` needs their values."""
    packed = packed_weights(model)
    if packed:
        raise UnsupportedError(
            subject,
            got=f"a model with packed weights ({next(iter(packed))}, ...)",
            expected="one in floating point",
            fix="Load it with tp_dequantize=True, or without quantization_config.",
        )


@contextmanager
def without_packed(model: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Exclude packed weights from a block that applies `move` to all parameters.

    Raises UnsupportedError if `move` would change their dtype.
    """
    packed = packed_weights(model)
    if any(
        move(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype != weight.dtype
        for weight in packed.values()
    ):
        check_not_packed(model, "another dtype")
    owners = [module for module in model.modules() if PACKED.find(module)]
    saved = [{name: module._parameters[name] for name in PACKED.of(module)} for module in owners]
    for module, placeholders in zip(owners, saved, strict=True):
        module._parameters.update(dict.fromkeys(placeholders))
    try:
        yield
    finally:
        for module, placeholders in zip(owners, saved, strict=True):
            module._parameters.update(placeholders)
