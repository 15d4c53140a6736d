"""Parameters that a load keeps packed: those of a quantised checkpoint, and those that are quantised as they arrive."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...anatomy import owner_of, tied_parameters
from ...checkpoint.reading.jobs import Request
from ...checkpoint.saving.save import STORED_FORM
from ...errors import UnsupportedError, in_one_line
from ...loading.memory import Holding
from ...loading.request import LoadRequest, Reads, Targets, split_reads
from ...loading.storage import Encoding, Tensors
from ..quantized.find import Quantization
from ..quantized.format import refuse_other
from .forward import hold_packed
from .stored_shards import PackedCheckpoint
from .weight import HeldWeight, pack

_WEIGHTS = "weights by torchao (TorchAoConfig of weights alone)"


@dataclass(frozen=True)
class ArrivedWeight(HeldWeight):
    """A shard quantised by torchao, whose own product rounds differently."""

    tensor: Any

    @property
    def nbytes(self) -> int:
        names, _ = self.tensor.__tensor_flatten__()
        return sum(getattr(self.tensor, name).nbytes for name in names)

    def decoded(self) -> torch.Tensor:
        weight: torch.Tensor = self.tensor.dequantize().to(self.dtype)
        return weight.contiguous()


@dataclass(frozen=True)
class Arriving(Encoding):
    """The quantisation that a caller requests for a checkpoint in floating point."""

    config: Any
    """A config of torchao."""
    excluded: Collection[str]
    """Substrings of the names of modules that stay in floating point."""

    @classmethod
    def find(
        cls, config: Any, requested: Any, *, folder: Path | None, known: Encoding | None, device: torch.device
    ) -> Encoding | None:
        """See `Encoding.find`; raises as `of`."""
        return None if requested is None else cls.of(requested, device)

    def recognised(self, tensors: Tensors, names: Collection[str]) -> Encoding:
        """See `Encoding.recognised`; raises UnsupportedError for quantised tensors."""
        if super().recognised(tensors, names) is not self:
            raise refuse_other("torchao")
        return self

    @classmethod
    def of(cls, requested: Any, device: torch.device) -> Arriving:
        """Parse transformers' TorchAoConfig. Raises UnsupportedError if it does not work on this `device`."""
        config = getattr(requested, "quant_type", None)
        if config is None:
            raise _unsupported(f"a {type(requested).__name__}", "a TorchAoConfig")
        if getattr(requested, "include_input_output_embeddings", False):
            raise _unsupported("quantised embeddings", "linears alone")
        arriving = cls(config, tuple(requested.modules_to_not_convert or ()))
        try:
            arriving.quantised(torch.ones(64, 256, dtype=torch.bfloat16, device=device)).decoded()
        except ImportError:
            raise UnsupportedError(
                "quantization_config",
                got="no torchao",
                expected=_WEIGHTS,
                fix="pip install 'tp-transformers[torchao]'.",
            ) from None
        except Exception as error:
            raise _unsupported(f"{type(config).__name__} ({in_one_line(error)})", _WEIGHTS) from None
        return arriving

    @property
    def group(self) -> int | None:
        """Columns that share a scale; None for one scale per row, or if the config does not specify it."""
        group = getattr(getattr(self.config, "granularity", None), "group_size", None)
        return group or getattr(self.config, "group_size", None)

    def names(self, model: Any) -> list[str]:
        """Name the parameters to quantise: weights of linear layers, except tied ones and the output head."""
        ties, head = tied_parameters(model), model.get_output_embeddings()
        tied = {*ties, *ties.values()}
        return [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and module is not head
            and f"{name}.weight" not in tied
            and not any(substring in name for substring in self.excluded)
        ]

    def check(self, name: str, shape: torch.Size) -> None:
        """Raise UnsupportedError if a shard does not consist of complete groups."""
        if self.group is not None and shape[-1] % self.group:
            raise _unsupported(f"{name}, of which this rank has {shape[-1]} columns", f"groups of {self.group}")

    def quantised(self, weight: torch.Tensor) -> ArrivedWeight:
        """Quantise a weight with torchao."""
        from torchao.quantization import quantize_  # type: ignore[import-not-found]

        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(linear, self.config)
        if type(linear.weight.data) is torch.Tensor:
            raise ValueError("it leaves weights as they are")
        return ArrivedWeight(weight.shape, weight.dtype, weight.device, linear.weight.detach())


def _unsupported(got: str, expected: str) -> UnsupportedError:
    fix = "Choose another, or other ranks; or leave out quantization_config."
    return UnsupportedError("quantization_config with tp_plan", got=got, expected=expected, fix=fix)


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
