"""The forward of a module with packed weights: decoded before it, dropped after it.

A backward that needs a weight decodes it again. The module's parameter is a placeholder on the meta device, with the
shape, dtype and shard of the weight. During the forward, the decoded weight replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..checkpoint.quantization.packed import PACKED, HeldWeight
from ..marks import untyped
from ..strategies import SHARD
from ..strategies.forward.attach import wrap_forward
from ..strategies.forward.short_forwards import Forwarder
from ..torch_api import top_saved_tensors_hooks


def hold_packed(module: nn.Module, name: str, weight: HeldWeight) -> None:
    """Decode the parameter `name` of a module, which is on the meta device, for each forward."""
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
    """Wrap a forward so that the module's weights are decoded while it runs."""

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
    """Decode the weights in those `storages` again in the backward, instead of keeping them for it.

    If other hooks already save tensors for the backward, as activation checkpoints do, they handle these weights too.
    """
    if not torch.is_grad_enabled() or top_saved_tensors_hooks(False) is not None:
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
