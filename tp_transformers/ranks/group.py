"""The ranks that share one model: gather values from all of them, and vote so that they fail together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import get_backend_config

from ..errors import MeshError, RemoteRankError, TensorParallelError, describe, error_text, shown
from ..marks import Mark
from ..torch_api import untraced
from .direct import transport_of
from .environment import firsts_of, local_size, node_name
from .limits import visible_cores

TP_AXIS = "tp"
"""Name of the DeviceMesh axis for tensor parallelism."""

HEARTBEAT = 5.0
"""Seconds between the collectives of ranks that wait for jobs; far below the timeout of a collective."""

E = TypeVar("E", bound=Exception)
T = TypeVar("T")
Report = tuple[type[TensorParallelError], str]
"""(class, message) of an error on another rank."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share one model, seen from one of them."""

    device_mesh: DeviceMesh | None
    """The 1-D mesh of the `tp` axis; None for a single process without a process group."""
    rank: int
    """Rank of this process on the axis."""
    size: int
    """Length of the axis."""
    device: torch.device
    """Device of this rank's shards."""
    copies: tuple[tuple[int, ...], ...] | None = None
    """The global ranks of each copy of a data-parallel model; None without copies."""
    reduce_dtype: torch.dtype | None = None
    """Dtype to all-reduce gradients of shared parameters in; None for the gradients' own dtype."""
    mesh: DeviceMesh | None = None
    """The mesh over all copies of the model, `tp` axis included; None without a process group."""

    @classmethod
    def of_mesh(cls, axis: DeviceMesh, device: torch.device, *, mesh: DeviceMesh | None = None) -> TensorParallelGroup:
        """The ranks of a 1-D mesh; `mesh`: the mesh over all copies of the model."""
        return cls(axis, axis.get_local_rank(), axis.size(), device, mesh=mesh)

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks of the first copy of the model, which is the copy to save."""
        if self.mesh is None or self.mesh.ndim == 1:
            return True
        names, position = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or ()
        return not any(index for index, name in zip(position, names, strict=True) if name != TP_AXIS)

    @property
    def writes(self) -> bool:
        """True on the rank that writes files for all ranks of all copies."""
        return self.rank == 0 and self.is_first_replica

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group of the axis; None for a single process without one."""
        return self.device_mesh.get_group() if self.device_mesh is not None else None

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the axis."""
        return self.device_mesh.mesh.tolist() if self.device_mesh is not None else [0]

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise MeshError on all ranks if a value differs between them. `values`: {subject of the error: value}."""
        everyone = self.gather(dict(values))
        rank, subjects = differing(everyone)
        if subjects:
            first, other = (shown(everyone[each][subjects[0]]) for each in (0, rank))
            if first == other or "..." in first + other:  # too long to show
                first, other = "one", "another"
            raise agreed(
                MeshError(
                    subjects[0],
                    got=f"{first} on rank 0 and {other} on rank {rank}",
                    expected="the same on all ranks",
                    fix="Give all ranks the same arguments, checkpoint and releases.",
                )
            )

    def gather(self, value: Any) -> list[Any]:
        """Gather the `value` of every rank, pickled. A collective and a vote.

        Raises RemoteRankError if a rank has ended or cannot be reached.
        """
        return self.everywhere(lambda: value)

    @untraced
    def _gather(self, value: Any) -> list[Any]:
        """Gather the `value` of every rank in one collective."""
        if self.size == 1 or self.process_group is None:
            return [value]
        message = pickle.dumps(value)
        try:
            messages = transport_of(self.process_group).messages(message)
            if messages is None:
                messages = exchange(message, self.process_group, self.device)
        except RuntimeError as error:
            lost = RemoteRankError(f"another rank ended, or cannot be reached: {error}")
            raise agreed(lost) from error  # a vote is impossible
        return [pickle.loads(data) for data in messages]

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Run `function` on every rank and gather the results in one collective; if it fails on one rank, all fail."""
        answers: list[T]
        with self.agree() as answers:
            answers.append(function())
        return answers

    @property
    def threads(self) -> int:
        """Number of threads for this rank: visible cores per rank of the node, at most 8."""
        return max(1, min(8, visible_cores() // (local_size() or self.size)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self

    def meet(self, jobs: Collection[Future[Any]]) -> list[Report | None]:
        """Wait until the `jobs` of all ranks are done; returns for each rank the error of a failed job, or None.

        The ranks gather their status every HEARTBEAT seconds, since a job may take longer than a collective's timeout.
        """
        while True:
            is_done = not wait(jobs, HEARTBEAT).not_done
            failed = (job.exception() for job in jobs) if is_done else ()
            answers = self._gather((reported(next(filter(None, failed), None)), is_done))
            reports = [report for report, _ in answers]
            if all(done for _, done in answers):
                return reports
            if any(report and not done for report, done in answers):  # a vote of a rank that failed before its jobs
                self._raise(None, reports)

    def together(self, function: Callable[[], T]) -> T:
        """Run `function` on all ranks, without a limit on its time; if one rank fails, all fail.

        It runs in the calling thread, where signals arrive; meanwhile another thread calls `meet`.
        """
        if self.size == 1:
            return function()
        job: Future[T] = Future()
        with ThreadPoolExecutor(1, initializer=bind_thread, initargs=(self.device,)) as executor:
            try:
                executor.submit(int).result()
            except Exception as error:  # no thread could start: this one reports the error to the other ranks
                job.set_exception(error)
                reports = self.meet([job])
            else:
                meeting = executor.submit(self.meet, [job])
                try:
                    job.set_result(function())
                except BaseException as error:
                    job.set_exception(error)
                reports = meeting.result()
        failure = job.exception()
        if failure is None or (isinstance(failure, Exception) and not is_agreed(failure)):
            self._raise(failure, reports)
        return job.result()

    def first_on_node(self, function: Callable[[bool], T]) -> T:
        """Run `function(True)` on the first rank of each node, then `function(False)` on the other ranks.

        If it fails on one rank, all fail.
        """
        nodes = self.everywhere(node_name)
        first = self.rank in firsts_of(nodes)
        result = self.together(lambda: function(True) if first else None)
        with self.agree():
            return function(False) if result is None else result

    def from_first(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0, and return its value on all ranks; if it fails, all fail."""
        value = self.together(lambda: function() if self.rank == 0 else None)
        return cast(T, self.gather(value)[0])

    @contextmanager
    def agree(self) -> Iterator[list[Any]]:
        """Context manager whose body succeeds on all ranks or fails on all: one collective at its end.

        If all ranks fail with the same error, each raises its own; otherwise all raise the error of the lowest rank
        that failed, and the message names that rank. So a fault on one rank leaves no other rank waiting. May be
        nested; an error that an inner one has agreed on passes through the outer ones without a second vote. The body
        may contain no collectives, except within an inner `agree()`. The vote also gathers the values that the body
        appends to the yielded list: afterwards it has those of all ranks.
        """
        failure: Exception | None = None
        answers: list[Any] = []
        try:
            yield answers
        except Exception as error:
            if self.size == 1 or is_agreed(error):
                raise
            failure = error
        # All votes have one format: the vote of a rank that failed early pairs with a later vote of the other ranks.
        votes = self._gather((reported(failure), answers))
        self._raise(failure, [report for report, _ in votes])
        answers[:] = [answer for _, per_rank in votes for answer in per_rank]

    def _raise(self, failure: Exception | None, reports: Sequence[Report | None]) -> None:
        """Raise if any rank reports an error: this rank's `failure` if all are equal, else that of the lowest rank."""
        for rank, report in enumerate(reports):
            if report is not None:
                if failure is not None and len(set(reports)) == 1 and not _lacks_memory(failure):
                    raise agreed(failure) from None
                kind, text = report
                raise agreed(kind(f"rank {rank}: {text}")) from failure


GROUP: Mark[TensorParallelGroup] = Mark("tp_group")
"""Mark on a model: the ranks that share it."""


_AGREED: Mark[bool] = Mark("_agreed_on")
"""Mark on an error: all ranks raise it."""


def agreed(error: E) -> E:
    """Mark an error that all ranks raise, so that `TensorParallelGroup.agree` lets it pass without a vote."""
    _AGREED.put(error, True)
    return error


def is_agreed(error: BaseException) -> bool:
    """True if all ranks raise `error`."""
    return bool(_AGREED.find(error))


def reported(failure: BaseException | None) -> Report | None:
    """The (class, message) of the error that the other ranks raise for `failure`; None for None."""
    if failure is None:
        return None
    if isinstance(failure, TensorParallelError):
        return type(failure), str(failure)
    if _lacks_memory(failure):
        return MeshError, describe(
            "memory",
            got=f"no more of it ({error_text(failure).partition(chr(10))[0]})",
            expected="enough for this rank's share",
            fix='Start more ranks, or load with tp_shares="memory" if others have more; `tp-transformers plan MODEL '
            "--memory` counts what each rank needs.",
        )
    return RemoteRankError, error_text(failure)


def _lacks_memory(failure: BaseException) -> bool:
    """True for an error of an allocation, by Python, numpy or torch."""
    is_torch = type(failure) is RuntimeError and "DefaultCPUAllocator" in str(failure)
    return is_torch or isinstance(failure, MemoryError | torch.OutOfMemoryError)


def differing(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """The first rank with other values than rank 0, and the names of these values; (0, []) if all ranks have the same.

    `ranks`: the values of each rank, by name.
    """
    for rank, values in enumerate(ranks):
        names = [name for name in {**ranks[0], **values} if values.get(name) != ranks[0].get(name)]
        if names:
            return rank, names
    return 0, []


def bind_thread(device: torch.device) -> None:
    """Set the current device of this thread; a new thread starts with device 0.

    A first call on device 0 would create a context there: about 0.5 GB of memory on another rank's GPU.
    """
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)


FIRST_BYTES = 504
"""Longest message, in bytes, that one collective gathers; longer messages take a second collective."""


def exchange(message: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Gather the message of every rank of `group`.

    `dist.all_gather_object` takes an extra collective for the lengths; here they are sent with the first bytes.
    """
    on = host_or(device, group)

    def gather(data: bytes, nbytes: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8).to(on)
        buffers = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(buffers, own, group=group)
        return [buffer.cpu().numpy().tobytes() for buffer in buffers]

    heads = gather(len(message).to_bytes(8, "little") + message[:FIRST_BYTES], 8 + FIRST_BYTES)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longer = max(lengths) - FIRST_BYTES
    tails = gather(message[FIRST_BYTES:], longer) if longer > 0 else [b""] * len(heads)
    return [(head[8:] + tail)[:n] for head, tail, n in zip(heads, tails, lengths, strict=True)]


def host_or(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """The CPU if `group` has a backend for CPU tensors, else `device`.

    gloo sends no GPU tensor to a single rank (it reads the address as one of the CPU), and NCCL makes a communicator,
    with buffers on the GPU, for each two ranks.
    """
    return torch.device("cpu") if "cpu:" in get_backend_config(group) else device
