"""Full tensors from shards, and shards from full tensors, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...ranks.collectives import apply_pair
from ...strategies.shards.tensors import gather, is_sharded, local_values, take_own
from ...torch_api import as_torch
from .pickled import check_pickled


def full_values(tensor: Any) -> Tensor:
    """Gather the full tensor on every rank, as an ordinary tensor; gradients flow back to `tensor`."""
    return apply_pair(local_values(tensor), gather, take_own, tensor.tp_shard)


def empty_full(tensor: Any) -> Tensor:
    """Return a tensor of the full shape that takes no memory (an expanded element)."""
    with as_torch():
        return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.tp_shard.shape)


def write(tensor: Any, full: Tensor) -> None:
    """Copy this rank's slice of `full` into `tensor`."""
    local = tensor.tp_shard.own(full)
    with as_torch():
        if isinstance(tensor, DTensor):
            tensor._local_tensor.copy_(local.detach())
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(local)


def assign(tensor: Any, value: Tensor) -> None:
    """Replace the data of a shard: `value` is a full tensor or this rank's shard; a full tensor is sliced to a copy.

    Raises UnsupportedError for another shape and, if `tensor` is a DTensor, for another dtype.
    """
    shard = tensor.tp_shard
    check_pickled(value, tensor, shard, "a parameter")
    if is_sharded(value) and value.tp_shard.layout == shard.layout:
        local = local_values(value).detach()
    else:
        full = full_values(value) if is_sharded(value) else value.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        shape, is_full = tuple(full.shape), tuple(full.shape) == tuple(shard.shape)
        if not is_full and shape != shard.local_shape:
            raise UnsupportedError(
                "data of a tensor-parallel parameter",
                got=f"shape {shape}",
                expected=f"the full shape {tuple(shard.shape)}, or this rank's {shard.local_shape}",
                fix="Assign a tensor of one of these shapes.",
            )
        local = shard.own(full).clone() if is_full else full
    with as_torch():
        if not isinstance(tensor, DTensor):
            tensor.data = local
        elif local.dtype == tensor.dtype:
            tensor._local_tensor = local.as_subclass(Tensor)
        else:
            raise UnsupportedError(
                "data of a tensor-parallel parameter",
                got=str(local.dtype),
                expected=str(tensor.dtype),
                fix="Cast the model with model.to(dtype).",
            )
