"""The reads of a load, in rounds: of weights that are dequantised, some at a time are in memory in both forms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..checkpoint.hub.fetch import fetch
from ..checkpoint.quantization.packed import HeldWeight
from ..checkpoint.reading.header import Checkpoint
from ..checkpoint.reading.jobs import Request, Statistics
from ..checkpoint.reading.local_file import LocalFile
from ..checkpoint.reading.memory import empty
from ..checkpoint.reading.reader import read
from ..ranks.group import TensorParallelGroup
from ..slices.lazy import LazyTensor, Leaf
from ..slices.stored import Stored
from .request import LoadRequest, is_quantised, leaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUND_BYTES = 256 << 20
"""Bytes that the weights of a round have, dequantised, on one rank; a larger weight has a round of its own."""


def names_arriving(model: PreTrainedModel, shards: Mapping[str, LazyTensor], request: LoadRequest) -> set[str]:
    """The parameters that are quantised as they arrive. Raises UnsupportedError where a shard cannot be."""
    if request.arriving is None:
        return set()
    names = shards.keys() & set(request.arriving.names(model))
    for name in sorted(names):
        request.arriving.check(name, shards[name].shape)
    return names


def cut_rounds(
    names: Sequence[str],
    expressions: Mapping[str, LazyTensor],
    dtypes: Mapping[str, torch.dtype],
    arriving: Collection[str],
    size: int,
    request: LoadRequest,
) -> list[list[str]]:
    """The names in rounds, the same on all ranks: first those that are in memory in one form, then some at a time."""
    is_decoded = request.quantization is not None
    changed = {name for name in names if name in arriving or (is_decoded and is_quantised(expressions[name]))}
    rounds = [[name for name in names if name not in changed]]
    room = 0
    for name in (name for name in names if name in changed):
        nbytes = expressions[name].numel() * dtypes[name].itemsize // size
        if nbytes > room:
            rounds.append([])
            room = ROUND_BYTES
        rounds[-1].append(name)
        room -= nbytes
    return rounds


def fill(
    stored: Sequence[Request],
    others: Sequence[tuple[Leaf, torch.Tensor]],
    checkpoint: Checkpoint,
    group: TensorParallelGroup,
    request: LoadRequest,
    progress: Callable[[int], object],
) -> Statistics:
    """Read the stored tensors, then let the leaves that depend on them fill their places; all ranks call it."""
    here = [each for each in stored if not each.tensor.source.is_remote]
    statistics = group.together(lambda: read(here, threads=group.threads, progress=progress))
    if request.shared:
        remote = [each for each in stored if each.tensor.source.is_remote]
        fetch(remote, sources=checkpoint.sources, group=group, progress=progress)

    def finish() -> None:
        for leaf, destination in others:
            leaf.fill(destination)
            progress(leaf.nbytes)

    group.together(finish)
    return statistics


def fill_round(
    shards: Mapping[str, LazyTensor],
    values: dict[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
    checkpoint: Checkpoint,
    group: TensorParallelGroup,
    request: LoadRequest,
    statistics: Statistics,
    progress: Callable[[int], object],
) -> dict[str, HeldWeight]:
    """Fill `values` of a later round; those that have no place in it yet are quantised, and returned."""
    with group.agree():
        arriving = {name: empty(shards[name].shape, dtypes[name], group.device) for name in shards.keys() - values}
        stored, others = leaves(shards, values | arriving)
    statistics.add(fill(stored, others, checkpoint, group, request, progress))
    if request.arriving is None:
        return {}
    quantise = request.arriving.quantised
    return group.together(lambda: {name: quantise(arriving.pop(name)) for name in sorted(arriving)})


def map_pages(shard: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The pages of the file with the shard, as a tensor, if they are the parameter's own values.

    A cut of a trailing dim is not: a view of 0.5 GB of such cuts takes 12 ms, and a copy 290, but a decode step takes 5
    to 7 times as long with it, since torch copies the weight of a bfloat16 linear that is not contiguous every time.
    """
    outline = torch.empty(shard.shape, device="meta")
    found = list(shard.pieces(outline))
    if len(found) != 1 or not isinstance(found[0][0], Stored) or not found[0][1].is_contiguous():
        return None
    boxes = [box for box, _ in found[0][0].boxes(found[0][1])]
    if len(boxes) != 1 or boxes[0].rows != 1 or boxes[0].dtype != dtype or boxes[0].start % dtype.itemsize:
        return None
    (box,) = boxes
    if not isinstance(box.source, LocalFile):
        return None
    return box.source.map(own=True).parameter(box.start, box.span, dtype, outline.shape)
