"""Collectives of plain tensors without autograd: by the transport of the group, or direct calls of the backend.

A transport moves CPU tensors in place of the backend of a process group; features add transports.
`torch.distributed.all_reduce` passes the dispatcher, which in a decode step takes longer than everything else of a
layer except its arithmetic. So the backend is called directly, as the dispatcher's kernel does. If a dispatch mode is
active (`CommDebugMode`, `FakeTensorMode`), torch.distributed is called. torch.compile traces functional collectives,
which it reorders, and fuses with adjacent matrix products. After a graph break in a caller, the collective is not
compiled either (`untraced`): compiled on its own, the steps of a transport would go wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions  # type: ignore[attr-defined]

from ..errors import UnsupportedError
from ..seams import features, first
from ..torch_api import (
    functional_all_reduce,
    is_transformed,
    traced_all_gather,
    traced_reduce_scatter,
    untraced,
    wait_tensor,
)
from ..torch_api import is_watched as is_watched

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM


class Transport:
    """Collectives of a process group that do not use its backend.

    A collective returns False, on all ranks, if they have to call the backend instead, as where `is_watched()` on one
    of them: its dispatch mode has to see the collective.
    """

    collectives = 0
    """Number of collectives that this rank has begun."""
    notices = False
    """True if ranks raise that have begun different collectives."""
    operators: Any = None
    """The collectives as custom operators for torch.compile, `all_reduce(x, maximum, group name)` and so on; None: it
    traces those of torch.distributed."""

    @property
    def ended(self) -> str:
        """The reason why no further collective is possible; "" if possible."""
        return ""

    def end(self, why: str) -> None:
        """Let waiting and later collectives raise. May be called from any thread."""

    def enter(self) -> None:
        """Count collectives from here on: ranks whose counts differ in a later one raise. May be nested."""

    def leave(self) -> None:
        """End what `enter` began."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> bool:
        """Sum `x`, of any shape and dtype, over the ranks in place, or take the maximum."""
        return False

    def all_gather(self, x: Tensor, outs: Sequence[Tensor]) -> bool:
        """All-gather `x` to `outs[rank]`, all of one shape and contiguous."""
        return False

    def reduce_scatter(self, x: Tensor, own: Tensor) -> bool:
        """Reduce-scatter `x: (size * n, ...)` to `own: (n, ...)`; both contiguous."""
        return False

    def all_to_all(self, received: Tensor, sent: Tensor, rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Send `counts[rank]` rows of `sent` to each rank, receive `rows[rank]` rows from it; both contiguous."""
        return False

    def broadcast(self, x: Tensor, source: int) -> bool:
        """Broadcast `x`, in place, from rank `source`."""
        return False

    def messages(self, message: bytes) -> list[bytes] | None:
        """All-gather messages of any lengths; None, on all ranks, if they have to call the backend instead."""
        return None


BACKEND = Transport()
"""Leaves all collectives to the backend."""

_transports: dict[int, Transport] = {}
"""Transports of process groups by `id`."""
OPERATORS: dict[str, Any] = {}
"""Custom operators by the name of a process group: a graph of torch.compile finds a renewed group by its name."""


def connect(group: dist.ProcessGroup) -> None:
    """Set up the transport of `group`, of the first feature that has one. Collective. A second call does nothing."""
    if id(group) in _transports or group.size() == 1:
        return
    transport = first((feature.transport(group) for feature in features().values()), BACKEND)
    _transports[id(group)] = transport
    weakref.finalize(group, _transports.pop, id(group), None).atexit = False
    OPERATORS[group.group_name] = transport.operators  # or None: a destroyed group may have had the same name


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport of `group`, for its CPU tensors."""
    return _transports.get(id(group), BACKEND)


Group = dist.ProcessGroup

_SUM, _GATHER, _SCATTER = AllreduceOptions(), AllgatherOptions(), ReduceScatterOptions()
for _options in (_SUM, _GATHER, _SCATTER):
    _options.asyncOp = False

_backends: dict[tuple[int, torch.device], Any] = {}
"""Backends, by the `id` of their group and the device of the tensor."""


def refuse_transforms() -> None:
    """Raise UnsupportedError inside `torch.func.vmap`, `grad`, ..., and forward-mode differentiation."""
    if is_transformed():
        raise UnsupportedError(
            "torch.func of a tensor-parallel model",
            got="a forward inside of vmap, grad, jvp or another transform",
            expected="a forward outside of them: collectives cannot be transformed",
            fix="Use loss.backward() or torch.autograd.grad; for one gradient a sample, one sample after another.",
        )
    if forward_ad._current_level >= 0:
        raise UnsupportedError(
            "torch.autograd.forward_ad in a tensor-parallel model",
            got="tangents, which collectives would leave out",
            expected="gradients",
            fix="Use torch.autograd.grad, twice for a product with the Jacobian.",
        )


@untraced
def all_reduce(x: Tensor, group: Group | None, op: dist.ReduceOp.RedOpType = SUM) -> None:
    """Sum `x` over the ranks in place, or take the maximum; no-op for one rank or without a group."""
    if group is None or group.size() == 1:
        return
    if torch.compiler.is_dynamo_compiling():
        if (operators := _operators(x, group)) is not None:
            x.copy_(operators.all_reduce(x, op is MAX, group.group_name))
        else:
            dist.all_reduce(x, op, group=group)
        return
    if transport_for(group, x).all_reduce(x, op):
        return
    if op != SUM or (backend := _backend(group, x)) is None:
        dist.all_reduce(x, op, group=group)
    elif (work := backend.allreduce([x], _SUM)) is not None:
        work.wait()


@untraced
def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks, as a new tensor: a dispatch mode may keep `x`."""
    if transport_for(group, x).all_reduce(copy := x.clone()):
        return copy
    total: Tensor = wait_tensor(functional_all_reduce(x, "sum", group.group_name))
    return total


@untraced
def all_gather(x: Tensor, group: Group) -> Tensor:
    """All-gather `x: (n, ...)` to (ranks * n, ...); returns `x` itself for one rank."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        if (operators := _operators(x, group)) is not None:
            return operators.all_gather(x, group.size(), group.group_name)  # type: ignore[no-any-return]
        return traced_all_gather(x, 0, group)  # type: ignore[no-any-return]
    x, out = x.contiguous(), x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    if transport_for(group, x).all_gather(x, out.chunk(group.size())):
        return out
    if (backend := _backend(group, x)) is None:
        return wait_tensor(traced_all_gather(x, 0, group))  # type: ignore[no-any-return]
    if (work := backend._allgather_base(out, x, _GATHER)) is not None:
        work.wait()
    return out


@untraced
def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter `x: (ranks * n, ...)` to (n, ...); returns `x` itself for one rank."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        if (operators := _operators(x, group)) is not None:
            return operators.reduce_scatter(x, group.size(), group.group_name)  # type: ignore[no-any-return]
        return traced_reduce_scatter(x, "sum", 0, group)  # type: ignore[no-any-return]
    x, own = x.contiguous(), x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if transport_for(group, x).reduce_scatter(x, own):
        return own
    if (backend := _backend(group, x)) is None:
        return wait_tensor(traced_reduce_scatter(x, "sum", 0, group))  # type: ignore[no-any-return]
    if (work := backend._reduce_scatter_base(own, x, _SCATTER)) is not None:
        work.wait()
    return own


@untraced
def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send `sent[rank]` rows of `x: (sum of sent, ...)` to each rank; receive `received[rank]` rows, in rank order."""
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced and (operators := _operators(x, group)) is not None:
        return operators.all_to_all(x, list(sent), list(received), group.group_name)  # type: ignore[no-any-return]
    x, arrived = x.contiguous(), x.new_empty((sum(received), *x.shape[1:]))
    transport = BACKEND if is_traced else transport_for(group, x)
    if not transport.all_to_all(arrived, x, received, sent):
        dist.all_to_all_single(arrived, x, list(received), list(sent), group=group)
    return arrived


@untraced
def broadcast(x: Tensor, group: Group | None, source: int) -> None:
    """Broadcast `x`, in place, from rank `source` of the group; no-op for one rank or without a group."""
    if group is None or group.size() == 1:
        return
    if not transport_for(group, x).broadcast(x, source):
        dist.broadcast(x, group=group, group_src=source)


def transport_for(group: Group, x: Tensor) -> Transport:
    """The transport that `x` takes. Raises UnsupportedError inside of a transform, which would not see it."""
    refuse_transforms()
    is_plain = x.is_cpu and type(x) in (Tensor, nn.Parameter) and not x.is_complex()
    return transport_of(group) if is_plain else BACKEND


def _operators(x: Tensor, group: Group) -> Any:
    """The custom operators for torch.compile to trace; None for torch's functional collectives."""
    return OPERATORS.get(group.group_name) if x.device.type == "cpu" else None


def _backend(group: Group, x: Tensor) -> Any:
    """The backend of `group` for the device of `x`; None if torch.distributed has to be called.

    So it has for a group of a subclass written in Python.
    """
    if is_watched() or type(x) is not Tensor or x.is_complex() or type(group) is not Group:
        return None
    backend = _backends.get((id(group), x.device))
    if backend is None:
        backend = _backends[id(group), x.device] = group._get_backend(x.device)
        weakref.finalize(group, _backends.clear).atexit = False
    return backend
