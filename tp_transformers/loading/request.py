"""The request of a load: its weights, the files that hold them, and collective reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ..checkpoint.reading.header import Checkpoint
from ..checkpoint.reading.jobs import Request, Statistics
from ..checkpoint.reading.reader import read
from ..ranks.group import TensorParallelGroup
from ..slices.lazy import LazyTensor, ReadStep, Resident
from ..slices.stored import Source, Stored
from ..transformers_api import LoadStateDictConfig
from .options import Options
from .storage import Encoding, Storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadRequest:
    """The weights of a load, and how to treat them."""

    config: LoadStateDictConfig
    """transformers' own request: renamings and converters, dtypes to keep, the index, the name for messages."""
    options: Options
    files: Sequence[str | Source] | None = None
    state_dict: Mapping[str, torch.Tensor] | None = None
    """Weights in memory, in place of files."""
    storage: Storage = field(default_factory=Storage)
    """Where the weights lie; the same kind on all ranks."""
    encoding: Encoding = field(default_factory=Encoding)
    """What the tensors mean."""
    shares_because: str = ""
    """Reason of the plan's shares, for the report; "" if the caller gave them."""

    def recognise(self, checkpoint: Checkpoint, model: PreTrainedModel) -> LoadRequest:
        """The request with the encoding that the tensors of the checkpoint show, if its config has none.

        Raises UnsupportedError if the caller wants another one.
        """
        if self.storage.has_own_names:
            return self
        given = {name: Resident(tensor) for name, tensor in (self.state_dict or {}).items()}
        names = model.state_dict().keys()
        return replace(self, encoding=self.encoding.recognised(given or checkpoint.tensors, names))

    def in_order(self) -> LoadRequest:
        """The request for an invariant plan: nothing is mapped, since bits depend on the alignment of weights."""
        return replace(self, options={**self.options, "tp_map": False})


@contextmanager
def open_together(request: LoadRequest, group: TensorParallelGroup) -> Iterator[Checkpoint]:
    """Open the files and read their headers on all ranks; close them at the end of the block.

    Raises CheckpointError on all ranks if it fails on one.
    """
    with ExitStack() as stack:
        checkpoint = group.together(lambda: stack.enter_context(open_checkpoint(request, rank=group.rank)))
        _read_first(checkpoint, request, group)
        yield checkpoint


def open_checkpoint(request: LoadRequest, *, rank: int) -> Checkpoint:
    """Open the files and read their headers, for the shards of `rank`. Raises CheckpointError if that fails."""
    if request.state_dict is not None:
        return Checkpoint(())
    return request.storage.open(request.files or (), request.config, rank=rank)


def _read_first(checkpoint: Checkpoint, request: LoadRequest, group: TensorParallelGroup) -> None:
    """Read the tensors that determine how others are sharded; they stay in memory."""
    names = request.encoding.read_first(checkpoint.tensors)
    if not names:
        return
    tensors = {name: checkpoint.tensors[name] for name in names}
    values = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    stored, _ = split_reads(tensors, values)
    read_together(stored, checkpoint, group, request)
    checkpoint.tensors.update({name: Resident(value) for name, value in values.items()})


Reads = list[Request]
Dependents = list[tuple[ReadStep, torch.Tensor]]
"""Tensors that are computed after the reads that they depend on, each with its destination."""


def split_reads(shards: Mapping[str, LazyTensor], values: Mapping[str, torch.Tensor]) -> tuple[Reads, Dependents]:
    """Split `shards` into tensors to read from files, and tensors computed from those; `values`: their destinations."""
    stored: Reads = []
    dependents: Dependents = []
    for name, shard in shards.items():
        for step, destination in shard.read_steps(values[name]):
            if isinstance(step, Stored):
                stored.append(Request(step, destination))
            else:
                dependents.append((step, destination))
    return stored, dependents


def read_together(
    reads: Reads,
    checkpoint: Checkpoint,
    group: TensorParallelGroup,
    request: LoadRequest,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Statistics:
    """Read local files, each rank by itself, then fetch remote bytes, which ranks share. Collective."""
    local = [entry for entry in reads if not entry.tensor.source.is_remote]
    statistics = group.together(lambda: read(local, threads=group.threads, progress=progress))
    remote = [entry for entry in reads if entry.tensor.source.is_remote]
    request.storage.fetch(remote, checkpoint, group, progress)
    return statistics
