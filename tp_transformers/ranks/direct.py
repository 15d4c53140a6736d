"""Collectives of plain tensors without autograd: through shared memory, or direct calls of the backend.

`torch.distributed.all_reduce` passes the dispatcher, which in a decode step takes longer than everything else of a
layer except its arithmetic. So the backend is called directly, as the dispatcher's kernel does. If a dispatch mode is
active (`CommDebugMode`, `FakeTensorMode`), torch.distributed is called. torch.compile traces functional collectives,
which it reorders, and fuses with adjacent matrix products. After a graph break in a caller, the collective is not
compiled either (`untraced`): compiled on its own, the steps in shared memory would go wrong.

CPU tensors go through shared memory if the ranks have it; under torch.compile, as custom operators. If a dispatch mode
is active on some ranks only, these set a flag in the memory, and all ranks call torch.distributed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions  # type: ignore[attr-defined]
from torch.fx.node import has_side_effect

from ..errors import UnsupportedError
from ..torch_api import (
    disable_current_modes,
    functional_all_reduce,
    is_transformed,
    lower_as_collectives,
    resolve_process_group,
    traced_all_gather,
    traced_reduce_scatter,
    untraced,
    wait_tensor,
)
from ..torch_api import is_watched as is_watched
from .shared_memory.interface import MAX as MAX
from .shared_memory.interface import SUM as SUM
from .shared_memory.interface import Transport
from .shared_memory.joining import NAMES, memory_of

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
        if _has_operators(x, group):
            x.copy_(_op_all_reduce(x, op is MAX, group.group_name))
        else:
            dist.all_reduce(x, op, group=group)
        return
    memory = _memory(group, x)
    if memory is not None and memory.all_reduce(x, op, by_backend=is_watched() > 0):
        return
    if op != SUM or (backend := _backend(group, x)) is None:
        dist.all_reduce(x, op, group=group)
    elif (work := backend.allreduce([x], _SUM)) is not None:
        work.wait()


@untraced
def all_reduced(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks, as a new tensor: a dispatch mode may keep `x`."""
    memory = _memory(group, x)
    if memory is not None and memory.all_reduce(copy := x.clone(), by_backend=True):
        return copy
    total: Tensor = wait_tensor(functional_all_reduce(x, "sum", group.group_name))
    return total


@untraced
def all_gather(x: Tensor, group: Group) -> Tensor:
    """All-gather `x: (n, ...)` to (ranks * n, ...); returns `x` itself for one rank."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        if _has_operators(x, group):
            return _op_all_gather(x, group.size(), group.group_name)
        gathered: Tensor = traced_all_gather(x, 0, group)
        return gathered
    x, out = x.contiguous(), x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    memory = _memory(group, x)
    if memory is not None and memory.all_gather(x, out.chunk(group.size()), by_backend=is_watched() > 0):
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
        if _has_operators(x, group):
            return _op_reduce_scatter(x, group.size(), group.group_name)
        scattered: Tensor = traced_reduce_scatter(x, "sum", 0, group)
        return scattered
    x, own = x.contiguous(), x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    memory = _memory(group, x)
    if memory is not None and memory.reduce_scatter(x, own, by_backend=is_watched() > 0):
        return own
    if (backend := _backend(group, x)) is None:
        return wait_tensor(traced_reduce_scatter(x, "sum", 0, group))  # type: ignore[no-any-return]
    if (work := backend._reduce_scatter_base(own, x, _SCATTER)) is not None:
        work.wait()
    return own


@untraced
def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send `sent[rank]` rows of `x: (sum of sent, ...)` to each rank; receive `received[rank]` rows, in rank order."""
    if torch.compiler.is_dynamo_compiling() and _has_operators(x, group):
        return _op_all_to_all(x, list(sent), list(received), group.group_name)
    x, arrived = x.contiguous(), x.new_empty((sum(received), *x.shape[1:]))
    memory = None if torch.compiler.is_dynamo_compiling() else _memory(group, x)
    if memory is None or not memory.all_to_all(arrived, x, received, sent, by_backend=is_watched() > 0):
        dist.all_to_all_single(arrived, x, list(received), list(sent), group=group)
    return arrived


@untraced
def broadcast(x: Tensor, group: Group | None, source: int) -> None:
    """Broadcast `x`, in place, from rank `source` of the group; no-op for one rank or without a group."""
    if group is None or group.size() == 1:
        return
    memory = _memory(group, x)
    if memory is None or not memory.broadcast(x, source, by_backend=is_watched() > 0):
        dist.broadcast(x, group=group, group_src=source)


def begun(group: Group, device: torch.device) -> int:
    """Number of collectives that this rank has begun."""
    own = group._get_backend(device)._get_sequence_number_for_group()  # type: ignore[attr-defined]
    memory = memory_of(group)
    return int(own) + (memory.collectives if memory is not None else 0)


def _memory(group: Group, x: Tensor) -> Transport | None:
    """The transport to send `x` through; None for torch.distributed."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_complex():
        return None
    memory = memory_of(group) if x.is_cpu else None
    if memory is not None:
        refuse_transforms()
    return memory


def _backend(group: Group, x: Tensor) -> Any:
    """The backend of `group` for the device of `x`; None if torch.distributed has to be called."""
    refuse_transforms()
    if is_watched() or type(x) is not Tensor or x.is_complex():
        return None
    return _backends.get((id(group), x.device)) or _find_backend(group, x)


def _find_backend(group: Group, x: Tensor) -> Any:
    if type(group) is not Group:  # a subclass written in Python
        return None
    backend = _backends[id(group), x.device] = group._get_backend(x.device)
    weakref.finalize(group, _backends.clear).atexit = False
    return backend


# The same collectives as custom operators, opaque to torch.compile. They return new tensors, so that a graph may keep
# their inputs, and look up the process group by name at run time: after `renew_process_group`, the new one. A graph
# keeps every operator, even if its result is unused, and calls them in the order of the forward. Otherwise the graphs
# of the ranks, which have shards of different lengths, could differ in the order that takes the least memory.

_LIBRARY = torch.library.Library("tp_transformers", "DEF")
_OPERATORS: list[Any] = []


def _has_operators(x: Tensor, group: Group) -> bool:
    """True if torch.compile should trace a collective of `x` as one of the custom operators below."""
    return x.device.type == "cpu" and group.group_name in NAMES


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
    """Register the operators with Inductor, once."""
    with disable_current_modes():
        lower_as_collectives(_OPERATORS)


def _summed(x: Tensor, maximum: bool, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, resolve_process_group(group), MAX if maximum else SUM)
    return total


_op_all_reduce = _operator(
    "all_reduce(Tensor x, bool maximum, str group) -> Tensor",
    _summed,
    lambda x, maximum, group: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_op_all_gather = _operator(
    "all_gather(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: all_gather(x, resolve_process_group(group)),
    lambda x, size, group: x.new_empty((size * x.shape[0], *x.shape[1:])),
)
_op_reduce_scatter = _operator(
    "reduce_scatter(Tensor x, int size, str group) -> Tensor",
    lambda x, size, group: reduce_scatter(x, resolve_process_group(group)),
    lambda x, size, group: x.new_empty((x.shape[0] // size, *x.shape[1:])),
)
_op_all_to_all = _operator(
    "all_to_all(Tensor x, SymInt[] sent, SymInt[] received, str group) -> Tensor",
    lambda x, sent, received, group: all_to_all(x, sent, received, resolve_process_group(group)),
    lambda x, sent, received, group: x.new_empty((sum(received), *x.shape[1:])),
)
