"""Collectives beside a process group's backend: the contract of a transport through memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM


class Transport:
    """How ranks of a process group communicate beside its backend.

    Each collective returns False, the same on all ranks, where they have to call the backend instead. With `by_backend`
    a rank says that it will; then all do.
    """

    collectives: int
    """How many this rank has begun."""

    @property
    def ended(self) -> str:
        """Why no collective can follow; "" where one can."""
        return ""

    def end(self, why: str) -> None:
        """Let collectives that wait, and all later ones, raise; from any thread."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """Sum `x`, of any shape and dtype, over the ranks in place, or take the maximum."""
        return False

    def all_gather(self, x: Tensor, outs: Sequence[Tensor], *, by_backend: bool = False) -> bool:
        """Write the `x` of every rank, all of one shape, to its tensor of `outs`; all are contiguous."""
        return False

    def reduce_scatter(self, x: Tensor, own: Tensor, *, by_backend: bool = False) -> bool:
        """Write to `own: (n, ...)` this rank's rows of the sum of all ranks' `x: (size * n, ...)`; both contiguous."""
        return False

    def all_to_all(
        self, received: Tensor, sent: Tensor, rows: Sequence[int], counts: Sequence[int], *, by_backend: bool = False
    ) -> bool:
        """Send `counts[rank]` rows of `sent` to every rank, and receive `rows[rank]` rows of each; both contiguous."""
        return False

    def broadcast(self, x: Tensor, source: int, *, by_backend: bool = False) -> bool:
        """Give `x`, in place, the values of rank `source`."""
        return False

    def messages(self, message: bytes) -> list[bytes] | None:
        """The message of every rank, of any length each; None where they have to call the backend instead."""
        return None
