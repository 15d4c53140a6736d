"""Set up shared memory for process groups, where all ranks can read one another's tokens in it."""

from __future__ import annotations

import os
import pickle
import secrets
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, get_backend_config

from ...logs import get_logger
from ...marks import untyped
from ...ranks.direct import BACKEND, SUM, Transport
from ...ranks.environment import machine_name
from ...ranks.group import exchange
from ...torch_api import get_default_store, is_watched
from . import operators
from .memory import SharedMemory
from .segment import TOKEN, WORDS, Segment, is_supported


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
        return self.memory.ended

    def end(self, why: str) -> None:
        self.memory.end(why)

    def enter(self) -> None:
        self.memory.enter()

    def leave(self) -> None:
        self.memory.leave()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> bool:
        """Sum `x` over the ranks in place, or take the maximum; bitwise equal on all ranks."""
        self.collectives += 1
        with operators.disable_current_modes() if is_watched() else nullcontext():
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


logger = get_logger(__name__)

VARIABLE = "TP_TRANSFORMERS_SHARED_MEMORY"
"""Environment variable; 0 turns shared memory off."""


def share(group: dist.ProcessGroup) -> Transport | None:
    """The shared memory of `group`, if its ranks can use one; if not, logs the reason at INFO. Collective."""
    if "cpu:gloo" not in get_backend_config(group):
        return None
    memory, why = _join(group)
    if memory is None:
        logger.info("ranks communicate by gloo, not through shared memory: %s", why)
    return memory


def _join(group: dist.ProcessGroup) -> tuple[Transport | None, str]:
    """The transport of this rank and "", or None on all ranks and the reason."""
    rank = group.rank()
    machines: dict[str, list[int]] = {}
    answers = _exchange((machine_name(), obstacle(), secrets.token_hex(8)), group)
    name = answers[0][2]
    for peer, (machine, why, _) in enumerate(answers):
        if why:
            return None, f"{why} (rank {peer})"
        machines.setdefault(machine, []).append(peer)
    local_ranks = next(ranks for ranks in machines.values() if rank in ranks)
    if len(machines) == group.size():
        return None, "each rank is on a machine of its own"
    segment, why = _map(group, local_ranks)
    if why:
        return None, why
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    is_one = len(machines) == 1
    memory = SharedMemory(segment, timeout.total_seconds(), is_complete=is_one) if segment is not None else None
    if is_one:
        return memory, ""
    firsts = [ranks[0] for ranks in machines.values()]
    return SeveralMachines(
        memory, _connect(firsts.index(rank), len(firsts), name, timeout) if rank in firsts else None
    ), ""


def obstacle() -> str:
    """The reason why this rank cannot share memory with any other; "" if it can."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    return "" if is_supported() else "it needs Linux on x86-64"


def _map(group: dist.ProcessGroup, ranks: list[int]) -> tuple[Segment | None, str]:
    """The segment of the `ranks` of this machine (None for a single rank), and the reason of a failure on any machine.

    Equal host names or boot ids do not prove that ranks see the same memory: containers may share them. So each rank
    writes a token to the memory, and reads the tokens of the others.
    """
    segment: Segment | None = None
    path: Path | None = None
    rank, why, token = group.rank(), "", secrets.randbits(62)
    place, size = ranks.index(rank), len(ranks)
    if rank == ranks[0] and size > 1:
        try:
            segment, path = Segment.create(size)
        except (OSError, ValueError) as error:
            why = f"rank {rank} can reserve no memory: {error}"
    try:
        answers = _exchange((path, why), group)
        why = next((why for _, why in answers if why), "")
        if not why and size > 1:
            try:
                segment = segment or Segment(answers[ranks[0]][0], place, size)
                segment.words[place * WORDS + TOKEN] = token
            except (OSError, ValueError) as error:
                why = f"rank {rank} cannot map the memory of rank {ranks[0]}: {error}"
        tokens = _exchange((token, why), group)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    why = next((why for _, why in tokens if why), "")
    if segment is not None and not why:
        read = [segment.words[peer * WORDS + TOKEN] for peer in range(size)]
        if read != [tokens[peer][0] for peer in ranks]:
            why = f"rank {rank} reads other memory than ranks {ranks}"
    return segment, next((why for why in _exchange(why, group) if why), "")


def _connect(rank: int, size: int, name: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Gloo between some ranks, under a new `name`. Not a torch process group, which would outlive the one it serves."""
    return dist.ProcessGroupGloo(PrefixStore(f"tp_transformers/{name}", get_default_store()), rank, size, timeout)


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    return [pickle.loads(data) for data in exchange(pickle.dumps(value), group, torch.device("cpu"))]
