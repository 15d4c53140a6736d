"""The memory of a load: places for this rank's shards, and the rounds of reads that fill them.

A contiguous shard of a local file is mapped, those of a `Holding` of a feature have another form than a tensor, all
others get memory of their own. Weights that are decoded, or change their form, are read in later rounds, so that only
some of them at a time are in memory in both forms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.reading.header import Checkpoint
from ..checkpoint.reading.jobs import Progress, Statistics
from ..checkpoint.reading.local_file import LocalFile
from ..checkpoint.reading.memory import empty
from ..ranks.group import TensorParallelGroup
from ..seams import added, first
from ..slices.lazy import LazyTensor
from ..slices.stored import Stored
from .request import LoadRequest, Reads, Targets, read_together, split_reads
from .storage import Tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Holding:
    """Parameters of one rank that are held in another form; this class: none."""

    weights: Mapping[str, Any] = {}
    """Those that are held already, by name; `reads` fill them. Each has its bytes in memory, `nbytes`, and the name of
    the way in which a forward multiplies it, `product`, for the report."""
    reads: Reads = []  # noqa: RUF012
    arriving: Collection[str] = ()
    """Names of those that `put` takes, each after its values have been read."""

    @classmethod
    def find(
        cls, model: PreTrainedModel, targets: Targets, shards: Tensors, device: torch.device, request: LoadRequest
    ) -> Holding | None:
        """The holding of this kind that a load asks for, of the `shards` of one rank; None: no parameter."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters in memory."""
        return sum(weight.nbytes for weight in self.weights.values())

    def check_in_order(self) -> None:
        """Raise UnsupportedError if products with the parameters are sums in another order than those of tensors."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Hold a parameter of `arriving`."""

    def hold(self, model: PreTrainedModel) -> None:
        """Make the modules of `model` compute with the parameters."""


ROUND_BYTES = 256 << 20
"""Bytes of the weights of one round, decoded, on one rank; a larger weight has a round of its own."""


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
    if not isinstance(block.source, LocalFile) or not block.source.has_map:
        return None
    return block.source.pages(block.start, block.span).view(dtype).view(meta.shape)


def _split_rounds(
    names: Sequence[str], targets: Targets, arriving: Collection[str], size: int, request: LoadRequest
) -> list[list[str]]:
    """Split the names into rounds, the same on all ranks: first those with one form in memory, then the others."""
    expressions = targets.conversion.expressions
    changed = {name for name in names if name in arriving or request.encoding.is_decoded(expressions[name])}
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


class Memory:
    """Places of this rank's shards, and the reads that fill them."""

    def __init__(
        self, model: PreTrainedModel, targets: Targets, group: TensorParallelGroup, request: LoadRequest
    ) -> None:
        """Allocate the shards of this rank, and plan the reads.

        Raises UnsupportedError if a parameter cannot be held as the request wants it.
        """
        self.group, self.request, self.dtypes = group, request, targets.dtypes
        shards = targets.shards(group.rank)
        found = (kind.find(model, targets, shards, group.device, request) for kind in added("holdings"))
        self.holding: Holding = first(found, Holding())
        self.shards = {name: shard for name, shard in shards.items() if name not in self.holding.weights}
        """Expressions of all parameters but those that are held in another form."""
        self.values: dict[str, torch.Tensor] = {}
        """Memory of the shards; one that is held in another form once it is read gets its own in its round."""
        self.statistics = Statistics()
        self.nbytes_mapped = 0
        """Bytes of the shards that are pages of a file, and need no read."""
        may_map, names = request.options.get("tp_map") is not False and group.device.type == "cpu", []
        for name, shard in self.shards.items():
            pages = _map_pages(shard, self.dtypes[name]) if may_map and name not in self.holding.arriving else None
            if pages is not None:
                self.values[name] = pages
                self.nbytes_mapped += pages.nbytes
                continue
            names.append(name)
            if name not in self.holding.arriving:
                self.values[name] = empty(shard.shape, self.dtypes[name], group.device)
        self.rounds = _split_rounds(names, targets, self.holding.arriving, group.size, request)
        """Names of the shards that are read together."""
        meta = {name: torch.empty(shard.shape, device="meta") for name, shard in self.shards.items()}
        reads, computed = split_reads(self.shards, meta)
        reads += self.holding.reads
        self.nbytes_in_files = sum(read.tensor.nbytes for read in reads) + sum(step.nbytes for step, _ in computed)
        """Bytes of the shards in the checkpoint."""
        self.local_reads = [read for read in reads if not read.tensor.source.is_remote]
        """Reads of all rounds from local files; mapped shards count, since their pages are read later."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(value.nbytes for value in self.values.values()) + self.holding.nbytes

    def fill(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Read, round by round. Collective.

        Raises CheckpointError on all ranks if one cannot read a file, or if a file has changed.
        """
        progress(self.nbytes_mapped)
        for names in self.rounds:
            self._fill_round(names, checkpoint, progress)
        self.group.together(checkpoint.check_unchanged)

    def _fill_round(self, names: Sequence[str], checkpoint: Checkpoint, progress: Progress) -> None:
        """Fill the shards of one round; those without memory are then held in another form."""
        group, shards = self.group, {name: self.shards[name] for name in names}
        with group.agree():
            unplaced = [name for name in names if name not in self.values]
            arriving = {name: empty(shards[name].shape, self.dtypes[name], group.device) for name in unplaced}
            reads, computed = split_reads(shards, self.values | arriving)
            reads += self.holding.reads
        self.holding.reads, self.local_reads = [], []  # they refer to the memory of other forms
        totals = self.statistics
        read_together(reads, computed, checkpoint, group, self.request, statistics=totals, progress=progress)
        if arriving:

            def put() -> None:
                for name in sorted(arriving):
                    self.holding.put(name, arriving.pop(name))

            group.together(put)
