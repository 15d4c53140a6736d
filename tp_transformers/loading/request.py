"""The request of a load: its files, their tensors in the model's terms, and the way they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..anatomy.names import tied_parameters
from ..checkpoint.conversion.convert import Conversion, convert, identity
from ..checkpoint.quantization.format import Format
from ..checkpoint.quantization.packed import PackedWeight, pack
from ..checkpoint.reading.header import Checkpoint, check_files
from ..checkpoint.reading.jobs import Request
from ..checkpoint.saving.manifest import Manifest
from ..checkpoint.saving.sharded_checkpoint import ShardedCheckpoint
from ..errors import CheckpointError
from ..marks import untyped
from ..slices.lazy import LazyTensor, Leaf, Resident
from ..slices.source import Source
from ..slices.stored import Stored
from ..transformers_api import LoadStateDictConfig
from .options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadRequest:
    """The weights of a load, and the way it treats them."""

    config: LoadStateDictConfig
    """transformers' own request: renamings and converters, dtypes that are kept, the index, the name for messages."""
    options: Options
    files: Sequence[str | Source] | None = None
    shared: bool = False
    """True if files are on the Hub, so that ranks share the bytes that they fetch; the same on all ranks."""
    state_dict: Mapping[str, torch.Tensor] | None = None
    """Weights in memory, in place of files."""
    sharded: Manifest | None = None
    """A pre-sharded checkpoint, in place of files: its names are the model's own, so nothing is converted."""
    quantization: Format | None = None
    """How the weights are quantised, if they are."""

    @property
    def stays_packed(self) -> bool:
        """True if quantised weights stay so in memory; else they are dequantised to the model's dtype."""
        return self.quantization is not None and self.options.tp_dequantize is False


def open_checkpoint(request: LoadRequest, *, rank: int) -> Checkpoint:
    """Open the files and read their headers, as `rank` best reads them. Raises CheckpointError where that fails."""
    if request.sharded is not None:
        return ShardedCheckpoint(request.sharded, rank=rank)
    if request.state_dict is not None:
        return Checkpoint(())
    files = request.files or ()
    names = [file.name if isinstance(file, Source) else file for file in files]
    check_files(names, folder=str(request.config.pretrained_model_name_or_path))
    return Checkpoint(files, weight_map=(request.config.sharded_metadata or {}).get("weight_map"))


Mismatched = set[tuple[str, torch.Size, torch.Size]]
"""(name, shape in the checkpoint, shape in the model)."""


def express(
    model: PreTrainedModel, checkpoint: Checkpoint, whole: Mapping[str, torch.Tensor], request: LoadRequest
) -> tuple[Conversion, Mismatched]:
    """Each parameter and persistent buffer in terms of checkpoint tensors, and the tensors that none of them uses.

    `whole` are meta tensors of the whole shapes. Raises CheckpointError on tensors of the wrong shape, unless they are
    to be ignored.
    """
    tensors: Mapping[str, LazyTensor] = checkpoint.tensors
    if request.state_dict is not None:
        tensors = {name: Resident(tensor) for name, tensor in request.state_dict.items()}
    if request.quantization is not None:
        tensors = request.quantization.expressed(tensors, stays_packed=request.stays_packed)
    shapes, entries = {name: tensor.shape for name, tensor in whole.items()}, request.config.weight_mapping
    conversion = convert(model, tensors, shapes, entries if request.sharded is None else None)
    if request.sharded is not None:
        # The model went through these before it was saved in shards; `save_pretrained` reverts them.
        gone_through = [entry for entry in entries or () if identity(entry) in request.sharded.conversions]
        untyped(model)._weight_conversions = gone_through
    return conversion, _take_mismatched(conversion, whole, request)


def leaves(
    shards: Mapping[str, LazyTensor], values: Mapping[str, torch.Tensor]
) -> tuple[list[Request], list[tuple[Leaf, torch.Tensor]]]:
    """Tensors in files, to be read together, and tensors that come after; each with the memory that it fills."""
    stored: list[Request] = []
    others: list[tuple[Leaf, torch.Tensor]] = []
    for name, shard in shards.items():
        for leaf, destination in shard.pieces(values[name]):
            if isinstance(leaf, Stored):
                stored.append(Request(leaf, destination))
            else:
                others.append((leaf, destination))
    return stored, others


def packable(
    model: PreTrainedModel,
    shards: Mapping[str, LazyTensor],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> tuple[dict[str, PackedWeight], list[Request]]:
    """The parameters that can stay packed, and the reads of their members.

    Tied ones cannot, which several modules compute with, and ones that are quantised in part.
    """
    ties = tied_parameters(model)
    untied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {*ties, *ties.values()}
    packed: dict[str, PackedWeight] = {}
    reads: list[Request] = []
    for name, shard in shards.items():
        found = pack(shard, dtypes[name], device) if name in untied else None
        if found is not None:
            packed[name] = found[0]
            reads += [Request(leaf, view) for leaf, view in found[1]]
    return packed, reads


def _take_mismatched(conversion: Conversion, whole: Mapping[str, torch.Tensor], request: LoadRequest) -> Mismatched:
    """Take tensors of the wrong shape out of `conversion`. Raises CheckpointError unless they are to be ignored."""
    mismatched = {
        (name, expression.shape, whole[name].shape)
        for name, expression in conversion.expressions.items()
        if expression.shape != whole[name].shape
    }
    if mismatched and not request.config.ignore_mismatched_sizes:
        lines = (f"\n  - {name}: got {tuple(got)}, expected {tuple(want)}" for name, got, want in sorted(mismatched))
        raise CheckpointError(
            f"checkpoint {request.config.pretrained_model_name_or_path}: tensors of the wrong shape:{''.join(lines)}\n"
            "Correct the config, or pass ignore_mismatched_sizes=True to initialise them anew."
        )
    for name, _, _ in mismatched:
        del conversion.expressions[name]
    return mismatched
