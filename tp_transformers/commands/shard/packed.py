"""Quantised weights that stay packed, cut for ranks that are not running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel

from ...checkpoint.conversion.convert import Conversion
from ...checkpoint.quantization.members import PACKED_CHECKPOINT, Members, beside, member_layouts, place_members
from ...loading.load import owner_of
from ...loading.request import LoadRequest, packing
from ...model.packed_forward import hold_packed
from ...plans.bind import Resolution
from ...ranks.group import TensorParallelGroup
from ...slices.composed import reshaped
from ...slices.lazy import LazyTensor
from ...strategies import take, whole_like


def pack(
    model: PreTrainedModel,
    conversion: Conversion,
    dtypes: Mapping[str, torch.dtype],
    resolution: Resolution,
    group: TensorParallelGroup,
    request: LoadRequest,
) -> dict[str, torch.Tensor]:
    """Let parameters stay packed, without values; returns their stored tensors as rank 0 holds them.

    There are none if the request does not want it.
    """
    ranks = []
    for rank in range(group.size):
        shards = {
            name: take(expression, resolution.layouts.get(name), rank)
            for name, expression in conversion.expressions.items()
        }
        ranks.append(packing(model, conversion, shards, dtypes, torch.device("meta"), request))
    first = ranks[0]
    if first.kept is None or not first.weights:
        return {}
    for name, weight in first.weights.items():
        hold_packed(*owner_of(model, name), weight)
    PACKED_CHECKPOINT.put(model, first.kept)
    state = place_members(member_layouts([Members(rank.weights.values()).outlines() for rank in ranks]), group)
    return state | beside(first.kept, state)


def stored_as(
    packed: Mapping[str, torch.Tensor], tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of a checkpoint that are `packed`, in the shapes that are cut."""
    for name, part in packed.items():
        yield name, reshaped(tensors[name], whole_like(part).shape)
