"""Parameters that a load keeps packed: those of a quantised checkpoint, and those that are quantised as they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...anatomy import owner_of, tied_parameters
from ...checkpoint.reading.jobs import Request
from ...checkpoint.saving.save import STORED_FORM
from ...errors import UnsupportedError
from ...loading.memory import Holding
from ...loading.request import LoadRequest, Reads, split_reads
from ...loading.storage import Tensors
from ...loading.targets import Targets
from ..quantized.find import Quantization
from .arriving import Arriving
from .forward import hold_packed
from .stored_shards import PackedCheckpoint
from .weight import HeldWeight, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Packing(Holding):
    """Parameters of one rank that stay packed."""

    weights: dict[str, HeldWeight] = field(default_factory=dict)
    reads: Reads = field(default_factory=list)
    """Reads of the tensors that encode them, and of tensors that are kept for a save."""
    arriving: frozenset[str] = frozenset()
    encoding: Arriving | None = None
    """Quantises the parameters that arrive."""
    kept: PackedCheckpoint = field(default_factory=PackedCheckpoint)

    @classmethod
    def find(
        cls, model: PreTrainedModel, targets: Targets, shards: Tensors, device: torch.device, request: LoadRequest
    ) -> Packing | None:
        """See `Holding.find`. Raises UnsupportedError if a shard cannot be quantised as it arrives."""
        if isinstance(request.encoding, Arriving):
            names = frozenset(shards.keys() & set(request.encoding.names(model)))
            for name in sorted(names):
                request.encoding.check(name, shards[name].shape)
            return cls(arriving=names, encoding=request.encoding)
        return pack_weights(model, targets, shards, device, request) if stays_packed(request) else None

    def check_in_order(self) -> None:
        """See `Holding.check_in_order`."""
        got, fix = "quantised weights in memory", "Leave out tp_dequantize=False and quantization_config."
        raise UnsupportedError("tp_invariant", got=got, expected="weights in floating point", fix=fix)

    def put(self, name: str, value: torch.Tensor) -> None:
        assert self.encoding is not None
        self.weights[name] = self.encoding.quantised(value)

    def hold(self, model: PreTrainedModel) -> None:
        """See `Holding.hold`; one weight at a time changes its layout."""
        for name in self.weights:
            self.weights[name] = hold_packed(*owner_of(model, name), self.weights[name])
        if self.weights:
            STORED_FORM.put(model, self.kept)


def stays_packed(request: LoadRequest) -> bool:
    """True if quantised weights stay so in memory; else they are dequantised to the model's dtype."""
    return isinstance(request.encoding, Quantization) and request.options.get("tp_dequantize") is False


def pack_weights(
    model: PreTrainedModel, targets: Targets, shards: Tensors, device: torch.device, request: LoadRequest
) -> Packing:
    """Parameters that stay packed; none unless the request wants packed weights.

    Tied parameters cannot stay packed, since several modules compute with them, nor can partly quantised ones.
    """
    packing, conversion = Packing(), targets.conversion
    if not isinstance(request.encoding, Quantization) or not stays_packed(request):
        return packing
    ties, unpacked = tied_parameters(model), list(conversion.fallbacks)
    untied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {*ties, *ties.values()}
    for name, shard in shards.items():
        packed = pack(shard, targets.dtypes[name], device) if name in untied else None
        if packed is not None:
            packing.weights[name] = packed[0]
            packing.reads += [Request(step, view) for step, view in packed[1]]
        elif request.encoding.is_decoded(shard):
            unpacked.append(name)
    kept = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in conversion.beside.items()}
    reads, dependents = split_reads(conversion.beside, kept)
    packing.reads += reads
    for step, destination in dependents:
        step.fill(destination)
    packing.kept = PackedCheckpoint(request.encoding, kept, unpacked)
    return packing
