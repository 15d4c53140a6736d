"""Process group and DeviceMesh of the ranks that share a model, and votes that make them fail together."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import MeshError, RemoteRankError, TensorParallelError, describe
from ..marks import Mark
from .environment import launcher, local_device, local_size, node_name, rendezvous

TP_AXIS = "tp"
"""Name of the DeviceMesh axis over which tensors are split."""

HEARTBEAT = 10.0
"""Seconds after which ranks that wait for one another's jobs meet; far below the timeout of a collective."""

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


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
    """Where this rank keeps its shards."""
    is_first_replica: bool = True
    """Whether no copy of the model comes before this one on the other axes of the mesh: the one that is saved."""
    copies: tuple[tuple[int, ...], ...] | None = None
    """The world ranks of every copy of a model that is data-parallel; else None."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients of what several ranks hold are summed; None for the gradients' own."""
    mesh_ranks: tuple[int, ...] = ()
    """The world ranks of the whole mesh that the model was loaded on, all copies included; empty without a mesh."""

    @property
    def writes(self) -> bool:
        """Whether this is the rank that writes what all ranks save together."""
        return self.rank == 0 and self.is_first_replica

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The axis' process group; None for one process without one."""
        return self.device_mesh.get_group() if self.device_mesh is not None else None

    @property
    def global_ranks(self) -> list[int]:
        """The world rank of every rank of the axis."""
        return self.device_mesh.mesh.tolist() if self.device_mesh is not None else [0]

    def check_same(self, subject: str, value: Any) -> None:
        """Raise MeshError on all ranks where they do not have the same `value`, which is pickled and compared."""
        values = self.gather(value)
        others = [rank for rank in range(self.size) if values[rank] != values[0]]
        if others:
            raise agreed(
                MeshError(
                    describe(
                        subject,
                        got=f"one on rank 0 and another on rank {others[0]}",
                        expected="the same on all ranks",
                        fix="All ranks have to call from_pretrained with the same arguments and the same checkpoint.",
                    )
                )
            )

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, pickled and gathered; all ranks have to call it.

        Raises RemoteRankError where a rank has ended, or cannot be reached.
        """
        values: list[Any] = [value] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(values, value, group=self.process_group)
            except RuntimeError as error:
                lost = RemoteRankError(f"another rank ended, or cannot be reached: {error}")
                raise agreed(lost) from error  # there is nobody left to vote with
        return values

    @property
    def threads(self) -> int:
        """Threads that this rank may keep busy: its share of the cores that it can see, at most 8."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = local_size() or self.size
        return max(1, min(8, cores // ranks))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        return self

    def meet(self, jobs: Collection[Future[Any]]) -> None:
        """Return on all ranks once the `jobs` of each are done or have failed.

        The ranks tell each other every HEARTBEAT seconds, since no collective may wait for as long as a job takes.
        """
        while not all(self.gather(not wait(jobs, HEARTBEAT).not_done)):
            pass

    def together(self, function: Callable[[], T]) -> T:
        """Run `function` on all ranks, however long it takes on some; where one fails, all do.

        It runs in the thread that calls, where signals arrive; meanwhile another thread meets those of other ranks.
        """
        if self.size == 1:
            return function()
        job: Future[T] = Future()
        with ThreadPoolExecutor(1, initializer=bind_thread, initargs=(self.device,)) as executor:
            with self.agree():  # that all ranks are here, each with a thread
                executor.submit(int).result()
            meeting = executor.submit(self.meet, [job])
            try:
                job.set_result(function())
            except BaseException as error:
                job.set_exception(error)
            meeting.result()
        with self.agree():
            return job.result()

    def first_on_node(self, function: Callable[[bool], T]) -> T:
        """Run `function(True)` on the first rank of each node, then `function(False)` on those that find what it left.

        Where it fails on one rank, all fail.
        """
        nodes = self.gather(node_name())
        first = nodes.index(nodes[self.rank]) == self.rank
        result = self.together(lambda: function(True) if first else None)
        with self.agree():
            return function(False) if result is None else result

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Run the block on all ranks, or fail on all: one collective at its end.

        If all ranks fail alike, each raises its own error; else all raise that of the lowest rank that failed, which
        the message names. So a fault on one rank leaves no other waiting.
        Blocks may nest; an error that has been agreed on inside passes through the outer ones without a second vote.
        Keep collectives out of the block, or guard them with a block of their own.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1 or _AGREED.find(error):
                raise
            failure = error
        if self.size == 1:
            return
        reports = self.gather(_report(failure))
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


def bind_thread(device: torch.device) -> None:
    """Make `device` this thread's own; threads start on device 0, where what they do first makes a context.

    A context on a GPU that is another rank's takes about 0.5 GB of its memory.
    """
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of `device`, on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Give the default generator of `device` a state that `random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def check_size(group: TensorParallelGroup, tp_size: int | None) -> None:
    """Raise MeshError where `tp_size` is asked for, and is not the number of ranks."""
    if tp_size is None or tp_size == group.size:
        return
    raise MeshError(
        describe(
            "tp_size",
            got=repr(tp_size),
            expected=f"{group.size}, the number of ranks that were started",
            fix=f"Launch with torchrun --nproc-per-node {tp_size}, or pass device_mesh= with a tp axis of that length."
            if isinstance(tp_size, int) and tp_size > 0
            else "Leave it out: it is only held against the number of ranks.",
        )
    )


def check_ranks(device_mesh: DeviceMesh) -> None:
    """Raise MeshError where this process is not in the mesh, or ranks do not ascend along each of its axes.

    Torch sorts the ranks of a process group, but places a DTensor's shards in the order of the mesh.
    """
    ranks = device_mesh.mesh
    if device_mesh.get_coordinate() is None:
        raise MeshError(
            describe(
                "device_mesh",
                got=f"one of ranks {ranks.flatten().tolist()} on rank {dist.get_rank()}",
                expected="one that this rank is in",
                fix="Call from_pretrained on the ranks of the mesh alone, or build it over all that were started.",
            )
        )
    if any((ranks.diff(dim=dim) < 0).any() for dim in range(ranks.ndim)):
        raise MeshError(
            describe(
                "device_mesh",
                got=f"ranks {ranks.tolist()}",
                expected="ranks that ascend along every axis",
                fix="Build it with init_device_mesh; to exchange axes, exchange their names.",
            )
        )


def join(device_mesh: DeviceMesh | None = None) -> TensorParallelGroup:
    """Join the tensor-parallel group: from `device_mesh`, a running process group, or a launcher's environment.

    Starts the process group if there is none and a launcher (torchrun, srun, mpirun) has started ranks: gloo on CPU,
    with nccl beside it on CUDA, the device bound before the group starts. Without one it is one process, with no group
    at all.

    Raises MeshError where `device_mesh` has no `tp` axis (and is not 1-D) or is none of `check_ranks`, where a node has
    more ranks than GPUs, or where ranks do not know where to meet.
    """
    given = device_mesh
    if device_mesh is None and (dist.is_initialized() or launcher() is not None):
        device_type = _start_process_group()
        device_mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(TP_AXIS,))
    elif device_mesh is not None:
        device_mesh = _tp_axis(device_mesh)
    if device_mesh is None:
        return TensorParallelGroup(None, 0, 1, local_device(_default_device_type()))
    is_first = given is None or _is_first_replica(given)
    device = local_device(device_mesh.device_type)
    bind_thread(device)
    ranks = tuple((device_mesh if given is None else given).mesh.flatten().tolist())
    return TensorParallelGroup(
        device_mesh, device_mesh.get_local_rank(), device_mesh.size(), device, is_first, mesh_ranks=ranks
    )


def _report(failure: Exception | None) -> tuple[type[TensorParallelError], str] | None:
    if failure is None:
        return None
    if isinstance(failure, TensorParallelError):
        return type(failure), str(failure)
    return RemoteRankError, f"{type(failure).__name__}: {failure}"


def _common_error(reports: Sequence[tuple[type[TensorParallelError], str] | None]) -> TensorParallelError:
    """The error of the lowest rank that failed."""
    rank, (kind, text) = next((rank, report) for rank, report in enumerate(reports) if report is not None)
    return kind(f"rank {rank}: {text}")


def _tp_axis(device_mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            describe(
                "device_mesh",
                got=repr(device_mesh),
                expected="a torch.distributed.device_mesh.DeviceMesh",
                fix="Leave it out to use all ranks, or build one with init_device_mesh.",
            )
        )
    check_ranks(device_mesh)
    names = device_mesh.mesh_dim_names or ()
    if TP_AXIS in names:
        return device_mesh[TP_AXIS] if device_mesh.ndim > 1 else device_mesh
    if device_mesh.ndim == 1:
        return device_mesh
    raise MeshError(
        describe(
            "device_mesh",
            got=f"{device_mesh.ndim} axes named {names or 'nothing'}",
            expected=f"one axis, or an axis named {TP_AXIS!r}",
            fix='Build it with init_device_mesh(type, shape, mesh_dim_names=("dp", "tp")).',
        )
    )


def _is_first_replica(device_mesh: DeviceMesh) -> bool:
    names = device_mesh.mesh_dim_names or ()
    position = device_mesh.get_coordinate() or ()
    return device_mesh.ndim == 1 or not any(at for at, name in zip(position, names, strict=True) if name != TP_AXIS)


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _start_process_group() -> str:
    """Start the default process group unless it runs; returns the device type of its meshes."""
    if dist.is_initialized():
        return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
    device_type = _default_device_type()
    if device_type == "cuda":
        device = local_device(device_type)
        torch.cuda.set_device(device)
        # Gloo beside it: FSDP2 with CPU offload has parameters on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **rendezvous())
    else:
        dist.init_process_group("gloo", **rendezvous())
    atexit.register(_stop_process_group)
    return device_type


def _stop_process_group() -> None:
    """At exit, end the group that we started: torch warns of one that is left, and NCCL may hang on it."""
    if dist.is_initialized():
        dist.destroy_process_group()
