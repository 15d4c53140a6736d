"""Weights that stay quantised in memory: decoded for each forward of their module, and dropped after it.

A backward that needs one decodes it again.

The module's parameter is a placeholder on the meta device: its shape, dtype and shard are those of the weight, and it
has no values. In the module's forward, the decoded weight stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import UnsupportedError
from ...marks import Mark, untyped
from ...slices.bundle import Decoded
from ...slices.lazy import LazyTensor
from ...slices.stored import Stored
from ...strategies import SHARD
from ...strategies.attach import wrap_forward
from ...strategies.shards.forwards import Forwarder


class HeldWeight(Protocol):
    """A rank's shard of a weight, in fewer bytes."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight that it stands for."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    def decoded(self) -> torch.Tensor:
        """The weight, contiguous."""


@dataclass(frozen=True)
class PackedWeight:
    """The members of a rank's shard, of `shape`; `dtype` and `device` are those of the weight that they stand for."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    places: Sequence[tuple[Decoded, tuple[int, ...], tuple[int, ...], int]]
    """Members, each with the size, strides and offset of the part of the weight that they stand for."""

    @property
    def nbytes(self) -> int:
        """Bytes of the members in memory."""
        return sum(part.nbytes for decoded, *_ in self.places for part in decoded.parts.values())

    def decoded(self) -> torch.Tensor:
        """The weight, contiguous."""
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for decoded, size, stride, offset in self.places:
            decoded.fill(weight.as_strided(size, stride, offset))
        return weight


def pack(
    shard: LazyTensor, dtype: torch.dtype, device: torch.device
) -> tuple[PackedWeight, list[tuple[Stored, torch.Tensor]]] | None:
    """A weight that stays packed, and the reads into its members; None where some of it is not quantised."""
    whole = torch.empty(shard.shape, dtype=dtype, device=device)  # for the places in it alone
    places, reads = [], []
    for leaf, view in shard.pieces(whole):
        if isinstance(leaf, Decoded):
            places.append((leaf, tuple(view.shape), tuple(view.stride()), int(view.storage_offset())))
        elif view.untyped_storage()._cdata == whole.untyped_storage()._cdata:
            return None
        elif isinstance(leaf, Stored):
            reads.append((leaf, view))
        else:
            leaf.fill(view)
    if not places or math.prod(shard.shape) == 0:
        return None
    return PackedWeight(shard.shape, dtype, device, places), reads


PACKED: Mark[dict[str, HeldWeight]] = Mark("tp_packed")
"""The packed weights of a module, by the names of its parameters."""


def hold_packed(module: nn.Module, name: str, weight: HeldWeight) -> None:
    """Let the parameter `name` of a module, on the meta device, be decoded for each forward."""
    shard = SHARD.of(module._parameters[name])
    placeholder = shard.wrap(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    untyped(placeholder)._is_hf_initialized = True
    module._parameters[name] = placeholder
    packed = PACKED.find(module)
    if packed is None:
        PACKED.put(module, {name: weight})
        wrap_forward(module, _with_weights)
    else:
        packed[name] = weight


def _with_weights(call: Forwarder) -> Forwarder:
    """The forward of a module with its weights decoded."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = PACKED.of(module)
        placeholders = {name: module._parameters[name] for name in packed}
        storages = {}
        for name, weight in packed.items():
            decoded = weight.decoded()
            storages[decoded.untyped_storage()._cdata] = weight
            module._parameters[name] = SHARD.of(placeholders[name]).wrap(decoded, requires_grad=False)
        try:
            with _decoded_again(storages):
                return call(module, *args, **kwargs)
        finally:
            module._parameters.update(placeholders)

    return forward


@contextmanager
def _decoded_again(storages: Mapping[int, HeldWeight]) -> Iterator[None]:
    """Let a backward decode the weights in those `storages` once more, so that none is kept for it.

    Where something else already keeps tensors for the backward, as activation checkpoints do, it does so with these.
    """
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        yield
        return

    def keep(tensor: torch.Tensor) -> Any:
        weight = storages.get(tensor.untyped_storage()._cdata)
        return tensor if weight is None else (weight, tensor.size(), tensor.stride(), tensor.storage_offset())

    def take(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        weight, *place = kept
        decoded: torch.Tensor = weight.decoded()
        return decoded.as_strided(*place)

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        yield


def packed_weights(model: nn.Module) -> Mapping[str, HeldWeight]:
    """The packed weights of a model, by the names of their parameters."""
    return {
        f"{prefix}.{name}".lstrip("."): weight
        for prefix, module in model.named_modules()
        for name, weight in (PACKED.find(module) or {}).items()
    }


def refuse_packed(model: nn.Module, subject: str) -> None:
    """Raise UnsupportedError where weights of the model are packed, for a `subject` that needs their values."""
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
    """Leave packed weights as they are in a block that applies `move` to all parameters.

    Raises UnsupportedError where it would change their dtype.
    """
    packed = packed_weights(model)
    if any(move(torch.empty(0, dtype=each.dtype, device=each.device)).dtype != each.dtype for each in packed.values()):
        refuse_packed(model, "another dtype")
    owners = [module for module in model.modules() if PACKED.find(module)]
    held = [{name: module._parameters[name] for name in PACKED.of(module)} for module in owners]
    for module, placeholders in zip(owners, held, strict=True):
        module._parameters.update(dict.fromkeys(placeholders))
    try:
        yield
    finally:
        for module, placeholders in zip(owners, held, strict=True):
            module._parameters.update(placeholders)
