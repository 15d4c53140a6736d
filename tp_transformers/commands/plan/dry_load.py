"""Load that stops before the first weight: the model on the meta device, its plan, its checkpoint's tensors.

One process reads the config and the headers. Dtypes, conversions and tied weights come from the code of a load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from ...anatomy.classes import model_class, read_config
from ...anatomy.names import tied_parameters
from ...checkpoint.conversion.convert import dtype_policy
from ...errors import CheckpointError, TensorParallelError
from ...loading.from_pretrained import from_pretrained_with
from ...loading.hook import enable
from ...loading.memory import pack_weights
from ...loading.request import LoadRequest, open_checkpoint
from ...loading.targets import describe
from ...plans.rules import Plan
from ...slices.lazy import LazyTensor

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")
"""Extensions of weight files, of any format."""


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
    twice: tuple[tuple[str, str], ...] = ()
    """Pairs of tied parameters that are both stored; a load keeps both if they differ, otherwise one."""
    read_whole: tuple[str, ...] = ()
    """Parameters with a conversion that does not commute with slicing: every rank reads all of them."""


@dataclass(frozen=True)
class Survey:
    """The results of a dry load."""

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


def survey(
    name: str,
    *,
    tp_plan: Any = "auto",
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    packed: bool = False,
    trust_remote_code: bool = False,
) -> Survey:
    """Prepare a load of a model, without reading weights.

    Args:
        name: a folder with a config and perhaps weights, the config in it, or a name on the Hub; only headers are
            fetched.
        tp_plan: as `from_pretrained` takes it.
        dtype: as `from_pretrained` takes it; for a config without weights and without dtype, "auto" is float32.
        revision: of a model on the Hub.
        packed: whether quantised weights stay packed (`tp_dequantize=False`).
        trust_remote_code: whether code of the repository may run.

    Raises:
        UsageError: if there is no such model.
        CheckpointError: if a load would reject the checkpoint, for a tensor of the wrong shape, say.
        PlanError: if there is no plan, or it is malformed.
        UnsupportedError: if a load would reject the model.
    """
    if os.path.isfile(name) and os.path.basename(name) == "config.json":
        name = os.path.dirname(name) or "."
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    kwargs: dict[str, Any] = {**where, "tp_plan": tp_plan, "tp_stream": True, "dtype": dtype}
    kwargs["tp_dequantize"] = not packed
    try:
        config = read_config(name, **where)
        has_weights = not os.path.isdir(name) or any(file.endswith(WEIGHTS) for file in os.listdir(name))
        if not has_weights:
            kwargs |= {"config": config, "state_dict": {}}
            kwargs["dtype"] = config.dtype or torch.float32 if dtype == "auto" else dtype
        try:
            with enable():
                from_pretrained_with(_stop, model_class(config, **where), name if has_weights else None, **kwargs)
        except _FoundError as found:
            model, plan, request = found.args
        policy = dtype_policy(request.config.dtype_plan)
        stock, filled, kept = _take_stock(model, request) if has_weights else (None, set(model.state_dict()), {})
        dtypes = {name: own for name in filled if (own := policy(name))}
        return Survey(name, model, plan, dtypes, stock, kept)
    except TensorParallelError:
        raise
    except Exception as error:  # a malformed config or folder may raise any error
        raise CheckpointError(f"{name}: {str(error).strip().splitlines()[0]}") from error


class _FoundError(Exception):
    """Ends a load before the first weight."""


def _stop(model: PreTrainedModel, plan: Plan, request: LoadRequest) -> NoReturn:
    """Replacement of a load: raises _FoundError with its arguments."""
    raise _FoundError(model, plan, request)


def _take_stock(model: PreTrainedModel, request: LoadRequest) -> tuple[Stock, set[str], dict[str, LazyTensor]]:
    """Compare the headers with the model.

    Returns the stock, the names that a load would fill, and the tensors that it would keep packed.
    """
    with open_checkpoint(request, rank=0) as checkpoint:
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
            twice=tuple(sorted(pair for pair in ties.items() if stored.issuperset(pair))),
            read_whole=tuple(sorted(conversion.fallbacks)),
        )
        names = pack_weights(model, targets, conversion.expressions, torch.device("meta"), request).weights
        packed = {name: conversion.expressions[name] for name in names}
    return stock, stored, packed
