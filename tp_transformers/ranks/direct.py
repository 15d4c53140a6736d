"""Collectives of plain tensors without autograd, called as directly as what watches operators lets them be.

The way from `torch.distributed.all_reduce` to the backend passes the dispatcher, which takes longer in a decode step
than all else that a layer has beside its arithmetic. So the backend is called itself, as the dispatcher's kernel does.
Where a dispatch mode listens (`CommDebugMode`, `FakeTensorMode`), torch.distributed is called. torch.compile sees
functional collectives, which it reorders, and fuses with the matrix products around them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from ..errors import UnsupportedError

Group = dist.ProcessGroup

# Their names until torch 2.12; the old ones warn from then on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_traced_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_traced_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

is_watched = torch._C._len_torch_dispatch_stack
"""True if a dispatch mode sees every operator."""

_SUM, _PARTS, _SCATTER = AllreduceOptions(), AllgatherOptions(), ReduceScatterOptions()
for _options in (_SUM, _PARTS, _SCATTER):
    _options.asyncOp = False

_backends: dict[tuple[int, torch.device], Any] = {}
"""The backends of groups, by their `id` and the device of a tensor."""


def all_reduce(x: Tensor, group: Group) -> None:
    """Sum `x` over the ranks, in place; nothing where there is one."""
    if group.size() == 1:
        return
    if torch.compiler.is_dynamo_compiling() or (backend := _backend(group, x)) is None:
        dist.all_reduce(x, group=group)
    elif (work := backend.allreduce([x], _SUM)) is not None:
        work.wait()


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks, as a functional collective: a dispatch mode may keep any tensor that it sees."""
    total: Tensor = functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name))
    return total


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The `x: (n, ...)` of all ranks, (ranks * n, ...); `x` itself where there is one."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        gathered: Tensor = _traced_all_gather(x, 0, group)
        return gathered
    x, whole = x.contiguous(), x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    if (backend := _backend(group, x)) is None:
        _all_gather(whole, x, group=group)
    elif (work := backend._allgather_base(whole, x, _PARTS)) is not None:
        work.wait()
    return whole


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's rows, (n, ...), of the sum of all ranks' `x: (ranks * n, ...)`; `x` itself where there is one."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        scattered: Tensor = _traced_reduce_scatter(x, "sum", 0, group)
        return scattered
    x, own = x.contiguous(), x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if (backend := _backend(group, x)) is None:
        _reduce_scatter(own, x, group=group)
    elif (work := backend._reduce_scatter_base(own, x, _SCATTER)) is not None:
        work.wait()
    return own


def _backend(group: Group, x: Tensor) -> Any:
    """The backend of the group for tensors such as `x`; None where the operator has to be called."""
    if forward_ad._current_level >= 0:
        raise UnsupportedError(
            "torch.autograd.forward_ad in a tensor-parallel model",
            got="tangents, which collectives would leave out",
            expected="gradients",
            fix="Use torch.autograd.grad, twice for a product with the Jacobian.",
        )
    if is_watched() or type(x) is not Tensor or x.is_complex():
        return None
    return _backends.get((id(group), x.device)) or _find(group, x)


def _find(group: Group, x: Tensor) -> Any:
    if type(group) is not Group:  # one that is written in Python
        return None
    found = _backends[id(group), x.device] = group._get_backend(x.device)
    weakref.finalize(group, _backends.clear).atexit = False
    return found
