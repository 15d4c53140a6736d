"""Transports: collectives of CPU tensors that features add, in place of the backend of a process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..seams import features, first

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM


class Transport:
    """Collectives of a process group that do not use its backend.

    A collective returns False, on all ranks, if they have to call the backend instead. A rank that has to passes
    `by_backend=True`; then all get False.
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

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """Sum `x`, of any shape and dtype, over the ranks in place, or take the maximum."""
        return False

    def all_gather(self, x: Tensor, outs: Sequence[Tensor], *, by_backend: bool = False) -> bool:
        """All-gather `x` to `outs[rank]`, all of one shape and contiguous."""
        return False

    def reduce_scatter(self, x: Tensor, own: Tensor, *, by_backend: bool = False) -> bool:
        """Reduce-scatter `x: (size * n, ...)` to `own: (n, ...)`; both contiguous."""
        return False

    def all_to_all(
        self, received: Tensor, sent: Tensor, rows: Sequence[int], counts: Sequence[int], *, by_backend: bool = False
    ) -> bool:
        """Send `counts[rank]` rows of `sent` to each rank, receive `rows[rank]` rows from it; both contiguous."""
        return False

    def broadcast(self, x: Tensor, source: int, *, by_backend: bool = False) -> bool:
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
    OPERATORS.pop(group.group_name, None)  # a destroyed group may have had the same name
    if transport.operators is not None:
        OPERATORS[group.group_name] = transport.operators


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport of `group`, for its CPU tensors."""
    return _transports.get(id(group), BACKEND)
