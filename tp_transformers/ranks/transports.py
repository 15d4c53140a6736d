"""The transports of a process group besides its backend: shared memory, and all-reduces on GPUs."""

from __future__ import annotations

import torch.distributed as dist

from .all_reduce.transport import accelerate, transport_of
from .shared_memory.interface import Transport
from .shared_memory.joining import memory_of, share


def set_up(group: dist.ProcessGroup) -> None:
    """Set up the transports that `group` can use, once. Collective. Raises MeshError on all ranks as `accelerate`."""
    accelerate(group)
    share(group)


def transports_of(group: dist.ProcessGroup) -> list[Transport]:
    """The transports of `group`, for tensors on any device."""
    return [transport for transport in (memory_of(group), transport_of(group)) if transport is not None]
