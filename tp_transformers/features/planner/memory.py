"""Memory of each rank, computed on the meta device.

Shapes and bytes follow from the layouts that `resolve` returns for the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ...anatomy import tied_parameters
from ...plans.bind import Resolution
from ...slices.layout import Layout
from ...slices.lazy import LazyTensor
from ...strategies import TensorParallelLayer, take
from ..command_line.models import most_tokens
from ..mtp.layers import drafting_plan, meta_layers
from ..packed.weight import pack, with_products
from .kv_cache import Cached, States, cached_attention, mixer_states
from .survey import Survey

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Optimizer -> tensors of states that it keeps for a parameter, of its shape and dtype."""

CONTEXT = 4096
"""Tokens of the sequence that is counted by default, if the model takes as many."""


@dataclass(frozen=True)
class Parameter:
    """A parameter and its shards."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype on the ranks."""
    layout: Layout | None
    """Layout of the shards; None if it is replicated."""
    strategy: str | None
    """Name of its strategy in the plan; None if it has no rule."""
    replicated_because: str | None
    """Reason why it is replicated; None if it is sharded."""
    tied: tuple[str, ...] = ()
    packed: tuple[int, ...] | None = None
    """Bytes of the unsharded parameter and of each rank's shard, if it stays packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter."""
        if self.packed is not None:
            return self.packed[0]
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)

    def local_bytes(self, size: int) -> list[int]:
        """Bytes of each rank's shard."""
        if self.packed is not None:
            return list(self.packed[1:])
        if self.layout is None:
            return [self.nbytes] * size
        slice_bytes = self.nbytes // max(self.shape[self.layout.dim], 1)
        return [width * slice_bytes for width in self.layout.split.widths]


@dataclass(frozen=True)
class Heads:
    """Head counts (query, KV) of one attention module, unsharded and on every rank."""

    name: str
    unsharded: tuple[int, int]
    ranks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of each rank: parameters, buffers and caches."""

    survey: Survey
    size: int
    batch: int
    context: int
    parameters: tuple[Parameter, ...]
    """In the model's order; tied parameters once."""
    heads: tuple[Heads, ...]
    buffer_bytes: int
    """Bytes of buffers, which are replicated."""
    cached: tuple[Cached, ...]
    states: tuple[States, ...]
    """States of mixers."""
    notes: tuple[str, ...]
    """Warnings that a load would log."""
    optimizer: str | None = None
    """The optimizer that the memory of training is counted for; None: no training."""
    summed: tuple[str, ...] = ()
    """Modules whose outputs are summed over the ranks."""

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for: arguments of `plan_memory`."""
        return {"batch": self.batch, "context": self.context, "optimizer": self.optimizer}

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters on every rank."""
        return _sum(self.size, (parameter.local_bytes(self.size) for parameter in self.parameters))

    @cached_property
    def cache_bytes(self) -> tuple[int, ...]:
        """Bytes of keys, values and states on every rank."""
        kept = [cached.nbytes for cached in self.cached]
        return _sum(self.size, [*kept, *(states.nbytes for states in self.states if states.nbytes is not None)])

    @property
    def training_bytes(self) -> tuple[int, ...]:
        """Bytes of gradients and of the optimizer's states on every rank; 0 without an optimizer."""
        per_parameter = 1 + OPTIMIZERS[self.optimizer] if self.optimizer is not None else 0
        return tuple(per_parameter * nbytes for nbytes in self.parameter_bytes)

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters, buffers, keys, values, states and training on every rank."""
        buffers = (self.buffer_bytes,) * self.size
        return _sum(self.size, (self.parameter_bytes, self.cache_bytes, buffers, self.training_bytes))

    @property
    def replicated_bytes(self) -> int:
        """Bytes that every rank holds, with any share: replicated parameters, buffers, and their training."""
        replicated = sum(parameter.nbytes for parameter in self.parameters if parameter.layout is None)
        per_parameter = 2 + OPTIMIZERS[self.optimizer] if self.optimizer is not None else 1
        return per_parameter * replicated + self.buffer_bytes


def default_context(model: PreTrainedModel) -> int:
    """Tokens of the sequence in the KV cache if nothing else is asked for: CONTEXT, or as many as the model takes."""
    return min(CONTEXT, most_tokens(model.config) or CONTEXT)


def plan_memory(
    survey: Survey,
    size: int,
    *,
    batch: int = 1,
    context: int = 0,
    encoder_context: int | None = None,
    optimizer: str | None = None,
) -> MemoryPlan:
    """Compute the memory of each of `size` ranks, with the shares of the plan.

    `batch`, `context`, `encoder_context`: see `cached_attention`. `optimizer`: a name of OPTIMIZERS, to count gradients
    and the optimizer's states.

    Raises PlanError if a load would: the plan does not fit, or replicates most of the model.
    """
    model, dtypes = survey.model, survey.dtypes
    resolution = survey.resolved(size)
    cached = cached_attention(
        model, resolution.attention, size, batch=batch, context=context, encoder_context=encoder_context
    )
    return MemoryPlan(
        survey,
        size,
        batch,
        context,
        tuple(_parameters(survey, resolution, size)),
        tuple(_heads(survey, resolution, size)),
        sum(buffer.numel() * dtypes.get(name, buffer.dtype).itemsize for name, buffer in model.named_buffers()),
        tuple(cached),
        tuple(mixer_states(model, resolution.split_heads, size, batch=batch)) if context else (),
        (*survey.notes, *resolution.notes),
        optimizer,
        tuple(name for name, strategy in resolution.module_strategies.items() if strategy.signature.sums),
    )


def draft_bytes(planned: MemoryPlan) -> tuple[int, ...] | None:
    """Bytes of the layers of `generate(use_mtp=True)` on every rank, in floating point; None if there are none."""
    survey = planned.survey
    layers = meta_layers(survey.model) if survey.stock is None or survey.stock.left_out else None
    if layers is None:
        return None
    plan = drafting_plan(survey.model, survey.resolved(planned.size).plan)
    drafting = replace(survey, model=layers, plan=plan, dtypes={}, packed={}, stock=None)
    return plan_memory(drafting, planned.size).total_bytes


def replan(planned: MemoryPlan, *, survey: Survey | None = None, size: int | None = None, **options: Any) -> MemoryPlan:
    """Compute `planned` again for another survey, number of ranks, or other `options` of `plan_memory`."""
    return plan_memory(survey or planned.survey, size or planned.size, **planned.options | options)


def _parameters(survey: Survey, resolution: Resolution, size: int) -> Iterator[Parameter]:
    """Yield every parameter of the model once, with its layout."""
    named = dict(survey.model.named_parameters(remove_duplicate=False))
    ties = tied_parameters(survey.model)
    homes = {param: name for name, param in reversed(named.items())}
    tied: dict[str, list[str]] = {}
    for name, param in named.items():
        home = ties[name] if ties.get(name) in named else homes[param]
        if home != name:
            tied.setdefault(home, []).append(name)
    aliases = {name for names in tied.values() for name in names}
    packed = cache(partial(_packed, size))  # layers of a config alone share their tensors
    for name, param in named.items():
        if name in aliases:
            continue
        layout = resolution.layouts.get(name)
        names = (name, *tied.get(name, ()))
        dtype = next(filter(None, map(survey.dtypes.get, names)), param.dtype)
        yield Parameter(
            name,
            tuple(param.shape),
            dtype,
            layout,
            resolution.rule_names.get(name),
            _replicated_because(name, resolution, size) if layout is None or size == 1 else None,
            names[1:],
            packed(survey.packed[name], dtype, layout) if name in survey.packed else None,
        )


def _packed(size: int, expression: LazyTensor, dtype: torch.dtype, layout: Layout | None) -> tuple[int, ...]:
    """Bytes of a packed parameter and of each rank's shard, in the layouts that a CPU multiplies."""
    shards = [expression, *(take(expression, layout, rank) for rank in range(size))]
    results = (pack(shard, dtype, torch.device("meta")) for shard in shards)
    return tuple(with_products(result[0]).nbytes if result is not None else 0 for result in results)


def _heads(survey: Survey, resolution: Resolution, size: int) -> Iterator[Heads]:
    """Yield the heads of every attention module that the plan describes."""
    if resolution.replicated_attention:  # a single rank describes it too
        described = survey.with_shares(None).resolved(1).attention
    else:
        described = resolution.attention
    for name, unsharded in described.items():
        local, counts = resolution.attention.get(name), (unsharded.query.length, unsharded.kv.length)
        ranks = tuple(zip(local.query.widths, local.kv.widths, strict=True)) if local is not None else (counts,) * size
        yield Heads(name, counts, ranks)


def _replicated_because(name: str, resolution: Resolution, size: int) -> str:
    """The reason why a parameter is replicated."""
    strategy, rule = resolution.param_strategies.get(name), resolution.rule_names.get(name)
    if size == 1:
        return "there is one rank"
    if strategy is None:
        return "no rule covers it"
    if any(f"{name}.".startswith(f"{attention}.") for attention in resolution.replicated_attention):
        return "there are more ranks than query heads"
    own, base = type(strategy), TensorParallelLayer
    if own.split_dim is base.split_dim and own.partition_tensor is base.partition_tensor:
        return f"the strategy is {rule or own.__name__}"
    return f"{rule or type(strategy).__name__} does not shard a {name.rpartition('.')[2]}"


def _sum(size: int, rows: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Sum each of `size` columns."""
    return tuple(map(sum, zip([0] * size, *rows, strict=True)))
