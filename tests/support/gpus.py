"""Gloo ranks in place of GPUs, for all-reduces of CUDA tensors: stand-ins for torch's operators, windows and events.

The operators check their arguments as torch's CUDASymmetricMemoryOps.cu does, and sum by gloo.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_transformers.ranks import direct
from tp_transformers.ranks.all_reduce import checked, transport, ways
from tp_transformers.ranks.all_reduce.choice import Way
from tp_transformers.ranks.all_reduce.transport import VARIABLE, transport_of

ROOM = 4096


class StandIns:
    """The state of this rank's stand-ins."""

    def __init__(self) -> None:
        self.group: Any = None
        self.symmetric: dict[int, str | None] = {}
        """{address of symmetric memory: the group that maps it}"""
        self.calls: list[str] = []
        self.hangs = False
        """True: kernels are launched, and never end."""
        self.captures = False
        self.fault: Callable[[str, Tensor], None] = lambda name, result: None
        """Called with each result."""

    def sum(self, name: str, symmetric: Tensor, op: str, group: str, *others: Tensor) -> Tensor:
        """Check the arguments as CUDASymmetricMemoryOps.cu does, and return the sum."""
        self.calls.append(name)
        at = symmetric.untyped_storage().data_ptr()
        assert (op, self.symmetric[at]) == ("sum", group)
        assert symmetric.dtype in (torch.float32, torch.bfloat16)
        alignments = []
        for x in (symmetric, *others):
            least = max(4, x.itemsize)
            alignment = aligned(int(x.storage_offset()) * x.itemsize), aligned(x.nbytes)
            assert x.is_contiguous()
            assert x.shape == symmetric.shape
            assert x.dtype == symmetric.dtype
            assert min(alignment) >= least
            assert x.data_ptr() % min(alignment) == 0
            alignments.append(min(alignment))
        assert len(set(alignments)) == 1
        result = self.gathered(others[0] if name == "one_shot_all_reduce_copy_out" else symmetric)
        self.fault(name, result)
        return result

    def gathered(self, x: Tensor) -> Tensor:
        """The sum in rank order."""
        if self.hangs:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        self.group._get_backend(torch.device("cpu")).allgather([parts], [x]).wait()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def aligned(nbytes: int) -> int:
    return next(each for each in (16, 8, 4, 2, 1) if nbytes % each == 0)


NOW = StandIns()
_library: list[torch.library.Library] = []


def one_shot_copy_out(symm_buffer: Tensor, local_input: Tensor, op: str, group: str, out: Tensor) -> Tensor:
    symm_buffer.copy_(local_input)
    return out.copy_(NOW.sum("one_shot_all_reduce_copy_out", symm_buffer, op, group, local_input, out))


def one_shot_out(x: Tensor, op: str, group: str, out: Tensor) -> Tensor:
    return out.copy_(NOW.sum("one_shot_all_reduce_out", x, op, group, out))


def two_shot(x: Tensor, op: str, group: str) -> Tensor:
    return x.copy_(NOW.sum("two_shot_all_reduce_", x, op, group))


def multimem(x: Tensor, op: str, group: str) -> Tensor:
    return x.copy_(NOW.sum("multimem_all_reduce_", x, op, group))


class Nccl:
    """A backend with symmetric windows."""

    mem_allocator = "allocator"

    def __init__(self, group: Any) -> None:
        self.group, self.registered = group, False

    def register_mem_pool(self, pool: Any, *, symm: bool) -> None:
        assert symm
        assert pool.allocator == self.mem_allocator
        self.registered = True

    def allreduce(self, tensors: list[Tensor]) -> None:
        (x,) = tensors
        NOW.calls.append("nccl_symmetric")
        assert x.is_contiguous()
        assert not self.registered or x.untyped_storage().nbytes() == ROOM
        total = NOW.gathered(x)
        NOW.fault("nccl_symmetric", total)
        x.copy_(total)


class Event:
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return not NOW.hangs


def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.full((nbytes,), 255, dtype=dtype, device=device)
    NOW.symmetric[x.untyped_storage().data_ptr()] = None
    return x


def rendezvous(x: Tensor, group: str) -> None:
    NOW.symmetric[x.untyped_storage().data_ptr()] = group


def facts(device: torch.device) -> ways.Facts:
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    reach = {f"gpu {other}": "nvlink" for other in range(size) if other != rank}
    return ways.Facts("host", f"gpu {rank}", reach, True, (9, 0), (2, 13), (2, 30, 7))


@contextlib.contextmanager
def gpus(value: str | None) -> Iterator[tuple[pytest.MonkeyPatch, list[str]]]:
    """Let CPU tensors of this rank take the way of CUDA tensors; yields a patch, and what is logged at WARNING."""
    if not _library:
        _library.append(torch.library.Library("symm_mem", "IMPL"))
        for name, function in (
            ("one_shot_all_reduce_copy_out", one_shot_copy_out),
            ("one_shot_all_reduce_out", one_shot_out),
            ("two_shot_all_reduce_", two_shot),
            ("multimem_all_reduce_", multimem),
        ):
            _library[0].impl(name, function, "CPU")
    NOW.__init__()  # type: ignore[misc]
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(transport.__name__)
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        if value is not None:
            patch.setenv(VARIABLE, value)
        patch.setattr(transport, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(transport, "facts_of", facts)
        patch.setattr(transport, "ROOM", ROOM)
        patch.setattr(transport, "_join", joining(transport._join))
        patch.setattr(checked, "SECONDS", 0.5)
        patch.setattr(ways, "empty_symmetric", empty)
        patch.setattr(ways, "rendezvous_symmetric", rendezvous)
        patch.setattr(ways, "_NAMES", set())
        patch.setattr(ways.Registered, "__init__", registered)
        patch.setattr(torch.cuda, "MemPool", lambda allocator: SimpleNamespace(allocator=allocator))
        patch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: NOW.captures)
        patch.setattr(torch.cpu, "Event", Event)
        patch.setattr(direct, "memory_of", transport_of)
        try:
            yield patch, warnings
        finally:
            logger.removeHandler(handler)


def joining(join: Callable[..., Any]) -> Callable[..., Any]:
    def with_group(group: Any, *others: Any) -> Any:
        NOW.group = group
        return join(group, *others)

    return with_group


def registered(self: Any, group: Any, device: torch.device, nbytes: int) -> None:
    ways.Buffer.__init__(self, group, device, nbytes)
    self._backend = Nccl(group)
    self.ways = {Way.NCCL_SYMMETRIC: lambda x: self.through(x, self._all_reduce)}
