"""All-reduce over several machines: shared memory within each, gloo between the first ranks of the machines."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor

from ...marks import untyped
from ...ranks.direct import BACKEND, SUM, Transport
from . import operators
from .memory import SharedMemory


class SeveralMachines(Transport):
    """Transport of a process group over several machines.

    It only has all_reduce; other collectives call the backend. Dispatch modes do not see it.
    """

    operators = operators

    def __init__(self, memory: SharedMemory | None, firsts: dist.ProcessGroupGloo | None) -> None:
        """`memory`: None for the only rank of a machine. `firsts`: gloo between the first ranks; None on the others."""
        self.memory, self.firsts = memory or BACKEND, firsts

    @property
    def ended(self) -> str:
        """See `Transport`."""
        return self.memory.ended

    def end(self, why: str) -> None:
        """See `Transport`."""
        self.memory.end(why)

    def enter(self) -> None:
        """See `Transport`."""
        self.memory.enter()

    def leave(self) -> None:
        """See `Transport`."""
        self.memory.leave()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM, *, by_backend: bool = False) -> bool:
        """Sum `x` over the ranks in place, or take the maximum; bitwise equal on all ranks."""
        self.collectives += 1
        with operators.disable_current_modes() if by_backend else nullcontext():
            dense = x.detach().contiguous()
            self.memory.all_reduce(dense, op)
            if self.firsts is not None:
                options = untyped(dist.AllreduceOptions())
                options.reduceOp = op
                untyped(self.firsts).allreduce([dense], options).wait()
            self.memory.broadcast(dense, 0)
            if not x.is_contiguous():
                x.detach().copy_(dense)
        return True
