"""The request of a load: its weights, the files that hold them, its targets, and collective reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ..checkpoint.conversion.convert import Conversion, own_dtypes
from ..checkpoint.reading.header import Checkpoint
from ..checkpoint.reading.jobs import Progress, Request, Statistics
from ..checkpoint.reading.reader import read
from ..errors import CheckpointError
from ..marks import untyped
from ..ranks.group import TensorParallelGroup
from ..slices.layout import Layout
from ..slices.lazy import LazyTensor, ReadStep, Resident
from ..slices.stored import Stored
from ..strategies import take, unsharded_like
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
    files: Sequence[str] = ()
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
        return replace(self, encoding=self.encoding.recognised(checkpoint.tensors, model.state_dict().keys()))


@contextmanager
def open_together(request: LoadRequest, group: TensorParallelGroup) -> Iterator[Checkpoint]:
    """Open the files and read their headers on all ranks; close them at the end of the block.

    Tensors that determine how others are sharded are read, and stay in memory. Raises CheckpointError on all ranks if
    it fails on one.
    """
    with ExitStack() as stack:
        checkpoint = group.together(lambda: stack.enter_context(open_checkpoint(request, rank=group.rank)))
        tensors = {name: checkpoint.tensors[name] for name in request.encoding.read_first(checkpoint.tensors)}
        if tensors:
            values = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
            read_together(*split_reads(tensors, values), checkpoint, group, request)
            checkpoint.tensors.update((name, Resident(value)) for name, value in values.items())
        yield checkpoint


def open_checkpoint(request: LoadRequest, *, rank: int) -> Checkpoint:
    """Open the files and read their headers, for the shards of `rank`. Raises CheckpointError if that fails."""
    if request.state_dict is None:
        return request.storage.open(request.files, request.config, rank=rank)
    checkpoint = Checkpoint(())
    checkpoint.tensors.update((name, Resident(tensor)) for name, tensor in request.state_dict.items())
    return checkpoint


@dataclass(frozen=True)
class Targets:
    """The parameters and persistent buffers of a model, by name."""

    full: Mapping[str, torch.Tensor]
    """Meta tensors of the full shapes, also of those that the checkpoint lacks."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes in memory."""
    layouts: Mapping[str, Layout | None]
    """Indices that each rank holds of a sharded tensor; None if it is replicated."""
    conversion: Conversion
    """Full values as expressions over checkpoint tensors."""
    mismatched: set[tuple[str, torch.Size, torch.Size]]
    """(name, shape in the checkpoint, shape in the model) of tensors of other shapes; they are initialised anew."""

    def shards(self, rank: int) -> dict[str, LazyTensor]:
        """The slices that `rank` holds; for a pre-sharded checkpoint, this opens the files with them."""
        expressions = self.conversion.expressions
        return {name: take(expression, self.layouts.get(name), rank) for name, expression in expressions.items()}


def describe(
    model: PreTrainedModel, checkpoint: Checkpoint, layouts: Mapping[str, Layout | None], request: LoadRequest
) -> Targets:
    """Describe each parameter and persistent buffer of `model` in terms of checkpoint tensors.

    Raises CheckpointError on tensors of the wrong shape, unless `ignore_mismatched_sizes` is set.
    """
    full = {name: unsharded_like(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: tensor.shape for name, tensor in full.items()}
    conversion = request.encoding.convert(model, checkpoint.tensors, shapes, request)
    applied = request.storage.applied(request.config.weight_mapping or ())
    if applied is not None:
        untyped(model)._weight_conversions = list(applied)
    mismatched = {
        (name, expression.shape, shapes[name])
        for name, expression in conversion.expressions.items()
        if expression.shape != shapes[name]
    }
    if mismatched and not request.config.ignore_mismatched_sizes:
        lines = (f"\n  - {name}: got {tuple(got)}, expected {tuple(want)}" for name, got, want in sorted(mismatched))
        raise CheckpointError(
            f"checkpoint {request.config.pretrained_model_name_or_path}: tensors of the wrong shape:{''.join(lines)}\n"
            "Correct the config, or pass ignore_mismatched_sizes=True to initialise them anew."
        )
    for name, _, _ in mismatched:
        del conversion.expressions[name]
    dtypes = {name: tensor.dtype for name, tensor in full.items()} | own_dtypes(full, request.config.dtype_plan)
    return Targets(full, dtypes, layouts, conversion, mismatched)


Reads = list[Request]
Computed = list[tuple[ReadStep, torch.Tensor]]
"""Tensors that are computed after the reads that they depend on, each with its destination."""


def split_reads(shards: Mapping[str, LazyTensor], values: Mapping[str, torch.Tensor]) -> tuple[Reads, Computed]:
    """Split `shards` into tensors to read from files, and tensors computed from those; `values`: their destinations."""
    steps = [entry for name, shard in shards.items() for entry in shard.read_steps(values[name])]
    stored = [Request(step, destination) for step, destination in steps if isinstance(step, Stored)]
    return stored, [(step, destination) for step, destination in steps if not isinstance(step, Stored)]


def read_together(
    reads: Reads,
    computed: Computed,
    checkpoint: Checkpoint,
    group: TensorParallelGroup,
    request: LoadRequest,
    *,
    statistics: Statistics | None = None,
    progress: Progress = lambda nbytes: None,
) -> None:
    """Read local files, each rank by itself, then remote bytes, which ranks share; then compute. Collective."""

    def compute() -> None:
        for step, destination in computed:
            step.fill(destination)
            progress(step.nbytes)

    local = [entry for entry in reads if not entry.tensor.source.is_remote]
    group.together(lambda: read(local, threads=group.threads, statistics=statistics, progress=progress))
    remote = [entry for entry in reads if entry.tensor.source.is_remote]
    request.storage.fetch(remote, checkpoint, group, progress)
    group.together(compute)
