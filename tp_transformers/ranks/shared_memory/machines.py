"""Sums over the ranks of several machines: in memory within each, between the machines by the first rank of each."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor

from ...marks import untyped
from ...torch_api import disable_current_modes
from .interface import SUM, Transport
from .transport import SharedMemory


class SeveralMachines(Transport):
    """One process group's transport between ranks of several machines, seen from one of them.

    It sums; for all other collectives the ranks call the backend. Dispatch modes do not see it.
    """

    def __init__(self, memory: SharedMemory | None, firsts: dist.ProcessGroupGloo | None) -> None:
        """`memory`: that of this machine, None for its only rank. `firsts`: every machine's first rank, on those."""
        self.memory, self.firsts = memory, firsts
        self.collectives = 0

    @property
    def ended(self) -> str:
        """See `Transport`."""
        return self.memory.ended if self.memory is not None else ""

    def end(self, why: str) -> None:
        """Let collectives that wait in memory, and all later ones, raise; from any thread."""
        if self.memory is not None:
            self.memory.end(why)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """Sum `x` over the ranks in place, or take the maximum; all ranks have the same bits."""
        self.collectives += 1
        with disable_current_modes() if by_backend else nullcontext():
            dense = x.detach().contiguous()
            if self.memory is not None:
                self.memory.all_reduce(dense, op)
            if self.firsts is not None:
                options = untyped(dist.AllreduceOptions())
                options.reduceOp = op
                untyped(self.firsts).allreduce([dense], options).wait()
            if self.memory is not None:
                self.memory.broadcast(dense, 0)
            if not x.is_contiguous():
                x.detach().copy_(dense)
        return True
