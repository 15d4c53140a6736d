"""The calls of torch: buffers that the GPUs of other ranks read, all-reduces on them, and facts about the GPUs.

A tensor is copied to the buffer of the group, padded to 16 bytes (the operators take multiples of 4, 8 or 16), and
back. `one_shot` copies in its kernel if the tensor is contiguous and aligned.

Reuse: torch's kernels begin and end with a barrier between the blocks of all ranks (`sync_remote_blocks`), so that no
rank writes the next input while another reads this one, and the next call on the same stream needs no second buffer.
A kernel waits for all ranks: on ranks that call it with other sizes, or not at all, it never ends.

CUDA graphs: torch's kernels and their copies may be captured, since buffers and signals stay where they are. NCCL may
be captured. `nccl_symmetric` is not: captured, it returned wrong sums (sglang pull requests 29946 and 34230).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...torch_api import detect_multicast, detect_nvlink, empty_symmetric, rendezvous_symmetric
from ..environment import machine_name
from .choice import Situation, Way

ALIGNMENT = 16
"""Bytes that one thread of a kernel reads at once."""


class Buffer:
    """A persistent buffer of one group, at the same address on the device of this rank for all its calls."""

    ways: dict[Way, Callable[[Tensor], None]]
    """Sum a contiguous tensor of one dimension over the ranks, in place; at most `nbytes`."""
    memory: Tensor

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        """`nbytes`: a multiple of 16. Holds the name of `group`, and not the group, which may be destroyed."""
        self.name, self.device, self.nbytes = group.group_name, device, nbytes
        self._views: dict[tuple[int, torch.dtype], Tensor] = {}

    def allocate(self) -> None:
        """Allocate the buffer on this rank. Raises RuntimeError."""

    def connect(self, group: dist.ProcessGroup) -> None:
        """Let all ranks access it. Collective. Raises RuntimeError."""

    def view(self, x: Tensor) -> Tensor:
        """The first elements of the buffer as a tensor with the dtype of `x`, as long as `x` with its padding."""
        key = x.numel(), x.dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 256:
                self._views.clear()
            padded = -(-x.nbytes // ALIGNMENT) * ALIGNMENT
            with torch.inference_mode(False):  # a view made in inference mode could not be written to outside of it
                view = self._views[key] = self.memory[:padded].view(x.dtype)
        return view

    def through(self, x: Tensor, function: Callable[[Tensor], Any]) -> None:
        """Copy `x` into the buffer, call `function` with it, and copy its result, or else the buffer, back."""
        view = self.view(x)
        view[: x.numel()].copy_(x)
        result = function(view)
        x.copy_((view if result is None else result)[: x.numel()])


class Symmetric(Buffer):
    """Memory that the GPUs of all ranks map: torch.distributed._symmetric_memory, with its backend for CUDA."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        super().__init__(group, device, nbytes)
        self.ways = {Way.ONE_SHOT: self.one_shot, Way.TWO_SHOT: self.two_shot, Way.MULTIMEM: self.multimem}

    def allocate(self) -> None:
        """See `Buffer`. Once for each name of a group: torch looks up the store, and mapped buffers, by the name."""
        if self.name in _NAMES:
            raise RuntimeError("an earlier group with this name has ended, and torch keeps its symmetric memory")
        _NAMES.add(self.name)
        self.memory = empty_symmetric(self.nbytes, dtype=torch.uint8, device=self.device).zero_()

    def connect(self, group: dist.ProcessGroup) -> None:
        """See `Buffer`."""
        rendezvous_symmetric(self.memory, self.name)

    def one_shot(self, x: Tensor) -> None:
        """Sum in rank order; one kernel without other copies if `x` is aligned."""
        operators, view = torch.ops.symm_mem, self.view(x)
        if view.numel() == x.numel() and not (
            x.data_ptr() % ALIGNMENT or int(x.storage_offset()) * x.itemsize % ALIGNMENT
        ):
            operators.one_shot_all_reduce_copy_out(view, x, "sum", self.name, x)
        else:
            self.through(x, lambda v: operators.one_shot_all_reduce_out(v, "sum", self.name, torch.empty_like(v)))

    def two_shot(self, x: Tensor) -> None:
        """Sum in rank order. `two_shot_all_reduce_out` would save a copy, but only has kernels for 2, 4 and 8 ranks."""
        self.through(x, lambda view: torch.ops.symm_mem.two_shot_all_reduce_(view, "sum", self.name))

    def multimem(self, x: Tensor) -> None:
        """Sum in the switch. `multimem_one_shot_all_reduce` sums on each rank, perhaps to other bits."""
        self.through(x, lambda view: torch.ops.symm_mem.multimem_all_reduce_(view, "sum", self.name))


class Registered(Buffer):
    """Memory in a pool that is registered with NCCL as a symmetric window, for its all-reduce in place.

    `symm_mem.set_backend("NCCL")` would do the same for all symmetric memory of the process, and leave none to torch's
    kernels. The buffer comes before the registration: later ones become symmetric in some releases only. It is never
    freed, since that calls the communicator, which may have ended.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        super().__init__(group, device, nbytes)
        self._backend: Any = group._get_backend(device)
        self.ways = {Way.NCCL_SYMMETRIC: lambda x: self.through(x, self._all_reduce)}

    def allocate(self) -> None:
        """See `Buffer`."""
        pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            self.memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        _KEPT.append((pool, self.memory))
        self._pool = pool

    def connect(self, group: dist.ProcessGroup) -> None:
        """See `Buffer`. The first all-reduce makes the communicator, without which a registration raises."""
        self._all_reduce(torch.zeros(1, device=self.device))
        self._backend.register_mem_pool(self._pool, symm=True)

    def _all_reduce(self, x: Tensor) -> None:
        if (work := self._backend.allreduce([x])) is not None:
            work.wait()


_KEPT: list[tuple[Any, Tensor]] = []
"""Registered pools and their buffers."""
_NAMES: set[str] = set()
"""Names of groups that have or had symmetric memory."""


@dataclass(frozen=True)
class Facts:
    """A rank's GPU, as it tells the other ranks."""

    machine: str
    gpu: str
    """UUID of the GPU."""
    reach: dict[str, str] = field(default_factory=dict)
    """{UUID of another GPU that this process sees: "nvlink", "pcie" or "none"}"""
    multicast: bool = False
    capability: tuple[int, int] = (0, 0)
    torch: tuple[int, ...] = (0, 0)
    nccl: tuple[int, ...] = (0, 0, 0)
    deterministic: bool = False


def facts_of(device: torch.device) -> Facts:
    """The facts about the GPU `device` of this rank. Raises RuntimeError on ROCm."""
    if torch.version.hip is not None:
        raise RuntimeError("not on ROCm, where nobody has run it")
    names = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    links, own = detect_nvlink(), device.index
    reach = {
        name: "none" if not torch.cuda.can_device_access_peer(own, other) else "nvlink" if links[own][other] else "pcie"
        for other, name in enumerate(names)
        if other != own
    }
    return Facts(
        machine_name(),
        names[own],
        reach,
        detect_multicast(own),
        torch.cuda.get_device_capability(device),
        tuple(int(part) for part in torch.__version__.split(".")[:2]),
        tuple(torch.cuda.nccl.version()),
        torch.are_deterministic_algorithms_enabled(),
    )


def situation_of(facts: list[Facts]) -> Situation:
    """The situation of the ranks with these `facts`."""
    order = ("none", "pcie", "nvlink")
    paths = [a.reach.get(b.gpu, "none") for a in facts for b in facts if a is not b]
    peers = min(paths, key=order.index, default="none")
    return Situation(
        len(facts),
        len({each.machine for each in facts}) == 1,
        "nvlink" if peers == "nvlink" else "pcie" if peers == "pcie" else "none",
        all(each.multicast for each in facts),
        min(each.capability for each in facts),
        min(each.torch for each in facts),
        min(each.nccl for each in facts),
        any(each.deterministic for each in facts),
    )
