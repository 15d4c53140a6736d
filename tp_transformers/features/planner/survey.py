"""Survey of a load: the model on the meta device, its plan, and the tensors of its checkpoint, before any weight.

Dtypes, conversions and tied weights come from the code of a load, which reads the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from ...anatomy import tied_parameters
from ...checkpoint.conversion.convert import own_dtypes
from ...checkpoint.reading.header import Checkpoint
from ...loading.request import LoadRequest, describe, open_checkpoint
from ...plans.bind import Resolution, resolve
from ...plans.rules import Plan
from ...slices.lazy import LazyTensor
from ..packed.holding import pack_weights, stays_packed
from ..packed.tiled import DECODED
from ..packed.weight import pack, with_products
from ..quantized.find import Quantization
from .described import described_packed


@dataclass(frozen=True)
class Stock:
    """Tensors of a checkpoint, compared with those that the model needs."""

    files: int
    nbytes: int
    """Bytes of their tensors."""
    bytes_read: int
    """Bytes of headers that were read."""
    missing: tuple[str, ...] = ()
    """Parameters that are not in the checkpoint; a load would initialise them."""
    unexpected: tuple[str, ...] = ()
    """Tensors that the model does not have; a load would ignore them."""
    left_out: tuple[str, ...] = ()
    """Tensors that the class of the model leaves out, such as layers that only `generate(use_mtp=True)` reads."""
    twice: tuple[tuple[str, str], ...] = ()
    """Pairs of tied parameters that are both stored; a load keeps both if they differ, otherwise one."""
    read_in_full: tuple[str, ...] = ()
    """Parameters with a conversion that does not commute with slicing: every rank reads all of them."""


@dataclass(frozen=True)
class Survey:
    """The results of a survey."""

    name: str
    model: PreTrainedModel
    """The unsharded model on the meta device."""
    plan: Plan
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of parameters and buffers on a rank, if they differ from the model's."""
    stock: Stock | None
    """The checkpoint; None if there is only a config."""
    packed: Mapping[str, LazyTensor] = field(default_factory=dict)
    """Parameters that stay packed -> lazy tensors of the checkpoint."""
    is_quantized: bool = False
    """True if the checkpoint is quantised."""
    notes: tuple[str, ...] = ()
    """What was guessed, and what has no effect."""

    @cached_property
    def resolved(self) -> Callable[[int], Resolution]:
        """`resolved(size)`: the plan on `size` ranks. Raises PlanError if the plan does not fit."""
        return cache(partial(resolve, self.plan, self.model))

    def with_shares(self, shares: tuple[float, ...] | None) -> Survey:
        """The same load with other shares of the ranks."""
        return replace(self, plan=replace(self.plan, shares=shares))


def take_survey(name: str, model: PreTrainedModel, plan: Plan, request: LoadRequest) -> Survey:
    """Survey the load of `request` into `model`, which is on the meta device.

    Raises CheckpointError if the load would reject the checkpoint.
    """
    stock, filled, packed = None, set(model.state_dict()), dict[str, LazyTensor]()
    if request.files or request.state_dict:
        with open_checkpoint(request, rank=0) as checkpoint:
            request = request.recognise(checkpoint, model)
            stock, filled, packed = _take_stock(model, checkpoint, request)
    elif stays_packed(request):
        packed = described_packed(model, request)
    dtypes = own_dtypes(filled, request.config.dtype_plan)
    notes = tuple(_notes(model, request, packed, is_stored=stock is not None))
    return Survey(name, model, plan, dtypes, stock, packed, isinstance(request.encoding, Quantization), notes)


def _notes(
    model: PreTrainedModel, request: LoadRequest, kept: Mapping[str, LazyTensor], *, is_stored: bool
) -> Iterator[str]:
    """What a survey of packed weights guesses, and whether there are any."""
    if request.options.get("tp_dequantize") is not False:
        return
    if not kept:
        because = (
            "its quantised format is not known"
            if isinstance(request.encoding, Quantization)
            else "nothing is quantised"
        )
        yield f"--packed has no effect: {because}"
    elif not is_stored:
        share = sum(tensor.numel() for tensor in kept.values()) / model.num_parameters()
        yield (
            f"{share:.0%} of the parameters are taken as quantised: linears and experts that quantization_config does "
            "not leave out; a checkpoint may leave out more"
        )
    packed = pack(next(iter(kept.values())), torch.bfloat16, torch.device("meta")) if kept else None
    if model.dtype != torch.bfloat16 and packed is not None and with_products(packed[0]).product != DECODED:
        yield f"in {str(model.dtype)[6:]}, packed weights are decoded in every forward; --dtype bf16 has an operator"


def _take_stock(
    model: PreTrainedModel, checkpoint: Checkpoint, request: LoadRequest
) -> tuple[Stock, set[str], dict[str, LazyTensor]]:
    """Compare the headers with the model.

    Returns the stock, the names that a load would fill, and the tensors that it would keep packed.
    """
    targets = describe(model, checkpoint, {}, request)
    conversion = targets.conversion
    stored = set(conversion.expressions)
    ties = tied_parameters(model)
    filled = stored | {tied for pair in ties.items() if stored.intersection(pair) for tied in pair}
    keys = SimpleNamespace(missing_keys=set(targets.full) - filled, unexpected_keys=conversion.unexpected)
    model._adjust_missing_and_unexpected_keys(keys)  # removes names that transformers never reports
    stock = Stock(
        files=len(request.files or checkpoint.sources),
        nbytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        bytes_read=sum(source.bytes_read + len(getattr(source, "head", b"")) for source in checkpoint.sources),
        missing=tuple(sorted(keys.missing_keys)),
        unexpected=tuple(sorted(keys.unexpected_keys)),
        left_out=tuple(sorted(conversion.unexpected - keys.unexpected_keys)),
        twice=tuple(sorted(pair for pair in ties.items() if stored.issuperset(pair))),
        read_in_full=tuple(sorted(conversion.fallbacks)),
    )
    names = pack_weights(model, targets, conversion.expressions, torch.device("meta"), request).weights
    packed = {name: conversion.expressions[name] for name in names}
    return stock, stored, packed
