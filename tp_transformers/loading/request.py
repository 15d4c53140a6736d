"""The request of a load: its files, their tensors in the model's terms, and the way they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..anatomy.names import tied_parameters
from ..checkpoint.conversion.convert import Conversion, convert, identity
from ..checkpoint.hub.fetch import fetch
from ..checkpoint.quantization.arriving import Arriving
from ..checkpoint.quantization.format import Quantization, member_names
from ..checkpoint.quantization.members import PackedCheckpoint
from ..checkpoint.quantization.packed import HeldWeight, pack
from ..checkpoint.reading.header import Checkpoint, check_files
from ..checkpoint.reading.jobs import Request
from ..checkpoint.reading.reader import read
from ..checkpoint.saving.manifest import Manifest
from ..checkpoint.saving.sharded_checkpoint import ShardedCheckpoint
from ..errors import CheckpointError
from ..marks import untyped
from ..ranks.group import TensorParallelGroup
from ..slices.bundle import Decoded
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
    quantization: Quantization | None = None
    """How the weights are quantised, if they are."""
    arriving: Arriving | None = None
    """How they are to be quantised, if they are not and shall be."""

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


def read_first(checkpoint: Checkpoint, request: LoadRequest, group: TensorParallelGroup) -> None:
    """Read the tensors of a quantised checkpoint that say how others are cut, all together; they are in memory then."""
    if request.quantization is None:
        return
    names = request.quantization.format.read_first(checkpoint.tensors)
    found = {name: checkpoint.tensors[name] for name in names}
    values = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}
    stored, _ = leaves(found, values)
    here = [each for each in stored if not each.tensor.source.is_remote]
    group.together(lambda: read(here, threads=group.threads))
    if request.shared:
        fetch([each for each in stored if each.tensor.source.is_remote], sources=checkpoint.sources, group=group)
    checkpoint.tensors.update({name: Resident(value) for name, value in values.items()})


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
    stored = tensors
    if request.quantization is not None:
        tensors = request.quantization.format.expressed(tensors, stays_packed=request.stays_packed)
    shapes, entries = {name: tensor.shape for name, tensor in whole.items()}, request.config.weight_mapping
    # Quantised tensors have the checkpoint's own names in a pre-sharded one too.
    has_own_names = request.sharded is not None and request.quantization is None
    conversion = convert(model, tensors, shapes, None if has_own_names else entries)
    if request.stays_packed:
        members = {name for tensor in tensors.values() for name in member_names(tensor)}
        conversion.beside = {
            name: tensor for name, tensor in stored.items() if name not in members and tensors.get(name) is not tensor
        }
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


def is_quantised(expression: LazyTensor) -> bool:
    """True if some of it is decoded from members that are read first."""
    outline = torch.empty(expression.shape, device="meta")
    return any(isinstance(leaf, Decoded) for leaf, _ in expression.pieces(outline))


@dataclass
class Packing:
    """The parameters of a rank that stay packed."""

    weights: dict[str, HeldWeight]
    reads: list[Request]
    """The reads of their members, and of tensors that are kept for a save."""
    kept: PackedCheckpoint | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the members in memory."""
        return sum(weight.nbytes for weight in self.weights.values())


def packing(
    model: PreTrainedModel,
    conversion: Conversion,
    shards: Mapping[str, LazyTensor],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    request: LoadRequest,
) -> Packing:
    """The parameters that stay packed, of those that the request wants to.

    Tied ones cannot, which several modules compute with, and ones that are quantised in part.
    """
    found = Packing({}, [])
    if request.quantization is None or not request.stays_packed:
        return found
    ties, unpacked = tied_parameters(model), list(conversion.fallbacks)
    untied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {*ties, *ties.values()}
    for name, shard in shards.items():
        made = pack(shard, dtypes[name], device) if name in untied else None
        if made is not None:
            found.weights[name] = made[0]
            found.reads += [Request(leaf, view) for leaf, view in made[1]]
        elif is_quantised(shard):
            unpacked.append(name)
    beside = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in conversion.beside.items()}
    reads, others = leaves(conversion.beside, beside)
    found.reads += reads
    for leaf, destination in others:
        leaf.fill(destination)
    found.kept = PackedCheckpoint(request.quantization, beside, unpacked)
    return found


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
