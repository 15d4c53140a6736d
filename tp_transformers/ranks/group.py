"""The ranks that share one model: values gathered from all of them, and votes that make them fail together."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError, RemoteRankError, TensorParallelError, error_text
from ..marks import Mark
from ..torch_api import untraced
from .environment import local_size, node_name
from .messages import exchange
from .shared_memory.joining import memory_of

TP_AXIS = "tp"
"""Name of the DeviceMesh axis over which tensors are split."""

HEARTBEAT = 5.0
"""Seconds after which ranks that wait for one another's jobs meet; far below the timeout of a collective."""

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
Report = tuple[type[TensorParallelError], str]
"""(class, message) of an error on another rank."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share one model, seen from one of them."""

    device_mesh: DeviceMesh | None
    """The 1-D mesh of the `tp` axis; None for one process without a process group."""
    rank: int
    """This process on the axis."""
    size: int
    """Length of the axis."""
    device: torch.device
    """Device of this rank's shards."""
    copies: tuple[tuple[int, ...], ...] | None = None
    """The world ranks of every copy of a model that is data-parallel; else None."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of sums over the ranks of gradients of shared parameters; None for the gradients' own."""
    mesh: DeviceMesh | None = None
    """The mesh of all copies of the model, its `tp` axis included; None without a process group."""

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks of the first copy of the model, the one that is saved."""
        if self.mesh is None or self.mesh.ndim == 1:
            return True
        names, position = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or ()
        return not any(at for at, name in zip(position, names, strict=True) if name != TP_AXIS)

    @property
    def writes(self) -> bool:
        """True on the one rank that writes files for all ranks of all copies."""
        return self.rank == 0 and self.is_first_replica

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The axis' process group; None for one process without one."""
        return self.device_mesh.get_group() if self.device_mesh is not None else None

    @property
    def global_ranks(self) -> list[int]:
        """The world rank of every rank of the axis."""
        return self.device_mesh.mesh.tolist() if self.device_mesh is not None else [0]

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise MeshError on all ranks where they do not have the same `values`: {what it is: pickled and compared}."""
        everyone = self.gather(dict(values))
        for subject in values:
            others = [rank for rank in range(self.size) if everyone[rank][subject] != everyone[0][subject]]
            if not others:
                continue
            raise agreed(
                MeshError(
                    subject,
                    got=f"one on rank 0 and another on rank {others[0]}",
                    expected="the same on all ranks",
                    fix="All ranks have to call from_pretrained with the same arguments and the same checkpoint.",
                )
            )

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, pickled and gathered; all ranks have to call it, and it is a vote, too.

        Raises RemoteRankError where a rank has ended, or cannot be reached.
        """
        return self.everywhere(lambda: value)

    @untraced
    def _gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in one collective."""
        if self.size == 1 or self.process_group is None:
            return [value]
        message, memory = pickle.dumps(value), memory_of(self.process_group)
        try:
            messages = memory.messages(message) if memory is not None else None
            if messages is None:
                messages = exchange(message, self.process_group, self.device)
        except RuntimeError as error:
            lost = RemoteRankError(f"another rank ended, or cannot be reached: {error}")
            raise agreed(lost) from error  # there is nobody left to vote with
        return [pickle.loads(each) for each in messages]

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """The results of `function()` on every rank, gathered in one collective; where it fails on one, all fail."""
        answers: list[T]
        with self.agree() as answers:
            answers.append(function())
        return answers

    @property
    def threads(self) -> int:
        """Threads that this rank may keep busy: its share of the cores that it can see, at most 8."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = local_size() or self.size
        return max(1, min(8, cores // ranks))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self

    def meet(self, jobs: Collection[Future[Any]]) -> list[Report | None]:
        """Return on all ranks once the `jobs` of each are done: for every rank, the error of a job that failed.

        The ranks gather this every HEARTBEAT seconds, since no collective may wait for as long as a job takes.
        """
        while True:
            is_done = not wait(jobs, HEARTBEAT).not_done
            failed = (job.exception() for job in jobs) if is_done else ()
            answers = self._gather((reported(next(filter(None, failed), None)), is_done))
            reports = [report for report, _ in answers]
            if all(done for _, done in answers):
                return reports
            if any(report and not done for report, done in answers):  # a vote: that rank failed before it came here
                self._raise(None, reports)

    def together(self, function: Callable[[], T]) -> T:
        """Run `function` on all ranks, however long it takes on some; where one fails, all do.

        It runs in the calling thread, where signals arrive; meanwhile another thread meets those of other ranks.
        """
        if self.size == 1:
            return function()
        job: Future[T] = Future()
        with ThreadPoolExecutor(1, initializer=bind_thread, initargs=(self.device,)) as executor:
            try:
                executor.submit(int).result()
            except Exception as error:  # there is no thread, so that this one meets the other ranks, with the error
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
        """Run `function(True)` on the first rank of each node, then `function(False)` on the others.

        If it fails on one rank, all fail.
        """
        nodes = self.everywhere(node_name)
        first = nodes.index(nodes[self.rank]) == self.rank
        result = self.together(lambda: function(True) if first else None)
        with self.agree():
            return function(False) if result is None else result

    @contextmanager
    def agree(self) -> Iterator[list[Any]]:
        """Run the block on all ranks, or fail on all: one collective at its end.

        If all ranks fail alike, each raises its own error; else all raise that of the lowest rank that failed, which
        the message names. So a fault on one rank leaves no other waiting.
        Blocks may nest; an error that has been agreed on inside passes through the outer ones without a second vote.
        Keep collectives out of the block, or guard them with a block of their own.
        The vote carries the values that the block appends to its list: afterwards the list has all ranks'.
        """
        failure: Exception | None = None
        answers: list[Any] = []
        try:
            yield answers
        except Exception as error:
            if self.size == 1 or is_agreed(error):
                raise
            failure = error
        # All votes are alike: that of a rank that failed early meets another one of those that went on.
        votes = self._gather((reported(failure), answers))
        self._raise(failure, [report for report, _ in votes])
        answers[:] = [answer for _, each in votes for answer in each]

    def _raise(self, failure: Exception | None, reports: Sequence[Report | None]) -> None:
        """Raise the error of all ranks, if one reports an error: the own `failure` if they are alike on all."""
        if not any(reports):
            return
        common = _common_error(reports) if failure is None or len(set(reports)) > 1 else failure
        raise agreed(common) from (failure if common is not failure else None)


GROUP: Mark[TensorParallelGroup] = Mark("tp_group")
"""The ranks that share a model, on the model."""

_AGREED: Mark[bool] = Mark("_agreed_on")
"""True on an error that all ranks raise."""


def agreed(error: E) -> E:
    """The error itself, which all ranks raise: `TensorParallelGroup.agree` lets it pass without a vote."""
    _AGREED.put(error, True)
    return error


def is_agreed(error: BaseException) -> bool:
    """True if all ranks raise `error`."""
    return bool(_AGREED.find(error))


def reported(failure: BaseException | None) -> Report | None:
    """The (class, message) of the error that other ranks raise for `failure`; None for None."""
    if failure is None:
        return None
    if isinstance(failure, TensorParallelError):
        return type(failure), str(failure)
    return RemoteRankError, error_text(failure)


def bind_thread(device: torch.device) -> None:
    """Make `device` the current one of this thread, which started with device 0.

    Its first call on device 0 would make a context there: about 0.5 GB of memory of another rank's GPU.
    """
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)


def _common_error(reports: Sequence[Report | None]) -> TensorParallelError:
    """The error of the lowest rank that failed."""
    rank, (kind, text) = next((rank, report) for rank, report in enumerate(reports) if report is not None)
    return kind(f"rank {rank}: {text}")
