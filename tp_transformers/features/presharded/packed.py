"""Sharding of quantised weights that stay packed, for absent ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from ...loading.request import LoadRequest
from ...loading.targets import Targets
from ...ranks.group import TensorParallelGroup
from ...slices.composed import reshaped
from ...slices.lazy import LazyTensor
from ...strategies import unsharded_like
from ..packed.holding import pack_weights
from ..packed.stored_shards import (
    StoredShards,
    place_stored,
    stored_layouts,
)


def pack(
    model: PreTrainedModel, targets: Targets, group: TensorParallelGroup, request: LoadRequest
) -> dict[str, torch.Tensor]:
    """Prepare parameters that stay packed, without values; returns their stored tensors on rank 0.

    Empty if the request is to dequantise.
    """
    device = torch.device("meta")
    ranks = [pack_weights(model, targets, targets.shards(rank), device, request) for rank in range(group.size)]
    first = ranks[0]
    if not first.weights:
        return {}
    first.kept.check_written()
    first.hold(model)
    state = place_stored(stored_layouts([StoredShards(rank.weights.values()).specs() for rank in ranks]), group)
    return state | first.kept.beside_of(state)


def stored_as(
    packed: Mapping[str, torch.Tensor], tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a checkpoint that are `packed`, in the full shapes that are sharded."""
    for name, tensor in packed.items():
        yield name, reshaped(tensors[name], unsharded_like(tensor).shape)
