"""Collectives of plain tensors without autograd, called as directly as what watches operators lets them be.

The way from `torch.distributed.all_reduce` to the backend passes the dispatcher, which takes longer in a decode step
than the layer's other overhead together. So the backend is called itself, as the dispatcher's kernel does. Where a
dispatch mode listens (`CommDebugMode`, `FakeTensorMode`), or torch.compile traces, the operator is called as ever.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

Group = dist.ProcessGroup

# Their names until torch 2.12; the old ones warn from then on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUM, _PARTS, _SCATTER = AllreduceOptions(), AllgatherOptions(), ReduceScatterOptions()
for _options in (_SUM, _PARTS, _SCATTER):
    _options.asyncOp = False

_backends: dict[tuple[int, torch.device], Any] = {}
"""The backends of groups, by their `id` and the device of a tensor."""


def all_reduce(x: Tensor, group: Group) -> None:
    """Sum `x` over the ranks, in place."""
    if (backend := _backend(group, x)) is None:
        dist.all_reduce(x, group=group)
    elif (work := backend.allreduce([x], _SUM)) is not None:
        work.wait()


def all_gather(whole: Tensor, x: Tensor, group: Group) -> None:
    """Fill `whole`, (ranks * n, ...), with the `x: (n, ...)` of all ranks."""
    if (backend := _backend(group, x)) is None:
        _all_gather(whole, x, group=group)
    elif (work := backend._allgather_base(whole, x, _PARTS)) is not None:
        work.wait()


def reduce_scatter(own: Tensor, x: Tensor, group: Group) -> None:
    """Fill `own: (n, ...)` with this rank's rows of the sum of all ranks' `x`, (ranks * n, ...)."""
    if (backend := _backend(group, x)) is None:
        _reduce_scatter(own, x, group=group)
    elif (work := backend._reduce_scatter_base(own, x, _SCATTER)) is not None:
        work.wait()


def _backend(group: Group, x: Tensor) -> Any:
    """The backend of the group for tensors such as `x`; None where the operator has to be called."""
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() or type(x) is not Tensor:
        return None
    return _backends.get((id(group), x.device)) or _find(group, x)


def _find(group: Group, x: Tensor) -> Any:
    if type(group) is not Group or x.is_complex():
        return None
    found = _backends[id(group), x.device] = group._get_backend(x.device)
    weakref.finalize(group, _backends.clear).atexit = False
    return found
