"""The memory of a load: places for this rank's shards, and the rounds of reads that fill them.

A contiguous shard of a local file is mapped, weights that stay packed keep the tensors that encode them, all others get
memory of their own. Weights that are dequantised, or quantised as they arrive, are read in later rounds, so that only
some of them at a time are in memory in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..anatomy.names import owner_of, tied_parameters
from ..checkpoint.reading.header import Checkpoint
from ..checkpoint.reading.jobs import Request, Statistics
from ..checkpoint.reading.local_file import LocalFile
from ..checkpoint.reading.memory import empty
from ..checkpoint.saving.save import STORED_FORM
from ..features.packed.forward import hold_packed
from ..features.packed.stored_shards import PackedCheckpoint
from ..features.packed.weight import HeldWeight, pack
from ..features.quantized.bundle import Decoded
from ..ranks.group import TensorParallelGroup
from ..slices.lazy import LazyTensor
from ..slices.stored import Stored
from .request import Dependents, LoadRequest, Reads, read_together, split_reads
from .targets import Targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUND_BYTES = 256 << 20
"""Bytes of the weights of one round, dequantised, on one rank; a larger weight has a round of its own."""


def allocate(model: PreTrainedModel, targets: Targets, group: TensorParallelGroup, request: LoadRequest) -> Memory:
    """Allocate the shards of this rank, and plan the reads that fill them.

    Raises UnsupportedError if a weight cannot be quantised as it arrives.
    """
    shards = targets.shards(group.rank)
    packed = pack_weights(model, targets, shards, group.device, request)
    dense = {name: shard for name, shard in shards.items() if name not in packed.weights}
    arriving = _names_arriving(model, dense, request)
    may_map = request.options.may_map and group.device.type == "cpu"
    values, mapped = {}, {}
    for name, shard in dense.items():
        if name in arriving:
            continue
        pages = _map_pages(shard, targets.dtypes[name]) if may_map else None
        values[name] = empty(shard.shape, targets.dtypes[name], group.device) if pages is None else pages
        if pages is not None:
            mapped[name] = shard
    in_place, _ = split_reads(mapped, values)
    first, *later = _split_rounds(
        [name for name in dense if name not in mapped], targets, arriving, group.size, request
    )
    stored, dependents = split_reads({name: dense[name] for name in first}, values)
    meta_values = {name: torch.empty(dense[name].shape, device="meta") for names in later for name in names}
    later_reads, _ = split_reads({name: dense[name] for name in meta_values}, meta_values)
    stored += packed.reads
    return Memory(
        group, request, dense, targets.dtypes, values, packed, in_place, stored, dependents, later, later_reads
    )


@dataclass
class Packing:
    """Parameters of this rank that stay packed."""

    weights: dict[str, HeldWeight]
    reads: Reads
    """Reads of the tensors that encode them, and of tensors that are kept for a save."""
    kept: PackedCheckpoint | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights in memory."""
        return sum(weight.nbytes for weight in self.weights.values())

    def hold(self, model: PreTrainedModel) -> None:
        """Make the modules of `model` compute with the weights; one weight at a time changes its layout."""
        for name in self.weights:
            self.weights[name] = hold_packed(*owner_of(model, name), self.weights[name])
        if self.weights:
            STORED_FORM.put(model, self.kept or PackedCheckpoint())


def pack_weights(
    model: PreTrainedModel,
    targets: Targets,
    shards: Mapping[str, LazyTensor],
    device: torch.device,
    request: LoadRequest,
) -> Packing:
    """Parameters that stay packed, if the request wants packed weights.

    Tied parameters cannot stay packed, since several modules compute with them, nor can partly quantised ones.
    """
    packing, conversion = Packing({}, []), targets.conversion
    if request.quantization is None or not request.stays_packed:
        return packing
    ties, unpacked = tied_parameters(model), list(conversion.fallbacks)
    untied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {*ties, *ties.values()}
    for name, shard in shards.items():
        packed = pack(shard, targets.dtypes[name], device) if name in untied else None
        if packed is not None:
            packing.weights[name] = packed[0]
            packing.reads += [Request(step, view) for step, view in packed[1]]
        elif _is_quantised(shard):
            unpacked.append(name)
    kept = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in conversion.beside.items()}
    reads, dependents = split_reads(conversion.beside, kept)
    packing.reads += reads
    for step, destination in dependents:
        step.fill(destination)
    packing.kept = PackedCheckpoint(request.quantization, kept, unpacked)
    return packing


def _names_arriving(model: PreTrainedModel, shards: Mapping[str, LazyTensor], request: LoadRequest) -> set[str]:
    """Names of the parameters that are quantised as they arrive. Raises UnsupportedError if a shard cannot be."""
    if request.arriving is None:
        return set()
    names = shards.keys() & set(request.arriving.names(model))
    for name in sorted(names):
        request.arriving.check(name, shards[name].shape)
    return names


def _map_pages(shard: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Map the shard as a tensor, if it is one contiguous range of a local file, of `dtype`; else None.

    A shard of a trailing dim is not mapped. A view of 0.5 GB of such shards takes 12 ms to make, and a copy 290 ms, but
    a decode step takes 5 to 7 times as long with the view: torch copies the weight of a bfloat16 linear every time if
    it is not contiguous.
    """
    meta = torch.empty(shard.shape, device="meta")
    entries = list(shard.read_steps(meta))
    if len(entries) != 1 or not isinstance(entries[0][0], Stored) or not entries[0][1].is_contiguous():
        return None
    blocks = [block for block, _ in entries[0][0].blocks(entries[0][1])]
    if len(blocks) != 1 or blocks[0].rows != 1 or blocks[0].dtype != dtype or blocks[0].start % dtype.itemsize:
        return None
    (block,) = blocks
    if not isinstance(block.source, LocalFile):
        return None
    return block.source.map(own=True).parameter(block.start, block.span, dtype, meta.shape)


def _split_rounds(
    names: Sequence[str], targets: Targets, arriving: Collection[str], size: int, request: LoadRequest
) -> list[list[str]]:
    """Split the names into rounds, the same on all ranks: first those with one form in memory, then the others."""
    expressions = targets.conversion.expressions
    is_decoded = request.quantization is not None
    changed = {name for name in names if name in arriving or (is_decoded and _is_quantised(expressions[name]))}
    rounds = [[name for name in names if name not in changed]]
    room = 0
    for name in (name for name in names if name in changed):
        nbytes = expressions[name].numel() * targets.dtypes[name].itemsize // size
        if nbytes > room:
            rounds.append([])
            room = ROUND_BYTES
        rounds[-1].append(name)
        room -= nbytes
    return rounds


def _is_quantised(expression: LazyTensor) -> bool:
    """True if some of it is decoded from tensors that are read first."""
    meta = torch.empty(expression.shape, device="meta")
    return any(isinstance(step, Decoded) for step, _ in expression.read_steps(meta))


@dataclass
class Memory:
    """Places of this rank's shards, and the reads that fill them."""

    group: TensorParallelGroup
    request: LoadRequest
    shards: Mapping[str, LazyTensor]
    """Expressions of all but packed weights."""
    dtypes: Mapping[str, torch.dtype]
    values: dict[str, torch.Tensor]
    """Memory of the shards; a weight that is quantised as it arrives gets its own in its round, and is packed then."""
    packed: Packing
    mapped: Reads
    """Shards that are mapped from a file: they need no read."""
    stored: Reads
    """Reads of the first round."""
    dependents: Dependents
    """Tensors that are computed from these reads."""
    later: Sequence[Sequence[str]]
    """Names of the shards of each later round."""
    later_reads: Reads
    """Reads of the later rounds, into meta tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(value.nbytes for value in self.values.values()) + self.packed.nbytes

    @cached_property
    def nbytes_in_files(self) -> int:
        """Bytes of the shards in the checkpoint."""
        reads = sum(read.tensor.nbytes for read in (*self.mapped, *self.stored, *self.later_reads))
        return reads + sum(step.nbytes for step, _ in self.dependents)

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of the shards that are pages of a file."""
        return sum(read.tensor.nbytes for read in self.mapped)

    @property
    def local_reads(self) -> Reads:
        """Reads of all rounds from local files; mapped shards count, since their pages are read later."""
        return [read for read in (*self.stored, *self.later_reads, *self.mapped) if not read.tensor.source.is_remote]

    def fill(self, checkpoint: Checkpoint, progress: Callable[[int], object]) -> Statistics:
        """Read, round by round; `progress` is called with byte counts. Collective.

        Raises CheckpointError on all ranks if one cannot read a file, or if a file has changed.
        """
        progress(self.nbytes_mapped)
        statistics = self._fill_round(self.stored, self.dependents, checkpoint, progress)
        self.stored, self.packed.reads = [], []  # they refer to the memory of packed weights
        for names in self.later:
            statistics.add(self._fill_later(names, checkpoint, progress))
        self.group.together(checkpoint.check_unchanged)
        return statistics

    def _fill_round(
        self, stored: Reads, dependents: Dependents, checkpoint: Checkpoint, progress: Callable[[int], object]
    ) -> Statistics:
        """Read the stored tensors, then compute the tensors that depend on them."""
        statistics = read_together(stored, checkpoint, self.group, self.request, progress)

        def finish() -> None:
            for step, destination in dependents:
                step.fill(destination)
                progress(step.nbytes)

        self.group.together(finish)
        return statistics

    def _fill_later(
        self, names: Sequence[str], checkpoint: Checkpoint, progress: Callable[[int], object]
    ) -> Statistics:
        """Fill one later round; shards without memory are quantised as they arrive, and then packed."""
        with self.group.agree():
            unplaced = [name for name in names if name not in self.values]
            arriving = {name: empty(self.shards[name].shape, self.dtypes[name], self.group.device) for name in unplaced}
            stored, dependents = split_reads({name: self.shards[name] for name in names}, self.values | arriving)
        statistics = self._fill_round(stored, dependents, checkpoint, progress)
        if self.request.arriving is not None:
            quantise = self.request.arriving.quantised
            weights = self.group.together(lambda: {name: quantise(arriving.pop(name)) for name in sorted(arriving)})
            self.packed.weights |= weights
        return statistics
