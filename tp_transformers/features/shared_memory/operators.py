"""The collectives of plain tensors as custom operators, opaque to torch.compile.

They return new tensors, so that a graph may keep their inputs, and look up the process group by name at run time: after
`renew_process_group`, the new one. A graph keeps every operator, even if its result is unused, and calls them in the
order of the forward. Otherwise the graphs of the ranks, which have shards of different lengths, could differ in the
order that takes the least memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ...ranks import direct
from ...ranks.direct import MAX, SUM
from ...torch_api import resolve_process_group, take

disable_current_modes = take("torch.utils._python_dispatch._disable_current_modes")
_LIBRARY = torch.library.Library("tp_transformers", "DEF")
_OPERATORS: list[Any] = []


def _operator(schema: str, function: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CPU")
    operator: Callable[..., Tensor] = getattr(torch.ops.tp_transformers, name).default
    has_side_effect(operator)

    def traced(*args: Any) -> Tensor:
        _keep_order()
        return shape(*args)

    torch.library.register_fake(f"tp_transformers::{name}", traced, lib=_LIBRARY)
    _OPERATORS.append(operator)
    return operator


@cache
def _keep_order() -> None:
    """Let Inductor treat the operators like torch's collectives, which it neither reorders nor drops; once."""
    with disable_current_modes():
        add_layout_constraint = take("torch._inductor.lowering.add_layout_constraint")
        strides = take("torch._inductor.lowering.constrain_to_fx_strides")
        register_lowering = take("torch._inductor.lowering.register_lowering")
        box = take("torch._inductor.ir.TensorBox")
        create = take("torch._inductor.ir._CollectiveKernel.create_out_of_place")
        for operator in _OPERATORS:
            add_layout_constraint(operator, strides)
            make = partial(create, operator)
            register_lowering(operator)(lambda *args, make=make: box.create(make(*args)))


def _summed(x: Tensor, maximum: bool, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    direct.all_reduce(total, resolve_process_group(group), MAX if maximum else SUM)
    return total


all_reduce = _operator(
    "all_reduce(Tensor x, bool maximum, str group) -> Tensor",
    _summed,
    lambda x, maximum, group: torch.empty_like(x, memory_format=torch.contiguous_format),
)
all_gather = _operator(
    "all_gather(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: direct.all_gather(x, resolve_process_group(group)),
    lambda x, size, group: x.new_empty((size * x.shape[0], *x.shape[1:])),
)
reduce_scatter = _operator(
    "reduce_scatter(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: direct.reduce_scatter(x, resolve_process_group(group)),
    lambda x, size, group: x.new_empty((x.shape[0] // size, *x.shape[1:])),
)
all_to_all = _operator(
    "all_to_all(Tensor x, SymInt[] sent, SymInt[] received, str group) -> Tensor",
    lambda x, sent, received, group: direct.all_to_all(x, sent, received, resolve_process_group(group)),
    lambda x, sent, received, group: x.new_empty((sum(received), *x.shape[1:])),
)
