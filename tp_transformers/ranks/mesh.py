"""Join the ranks that share a model: the store of the launch, the process group, the device and the DeviceMesh."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, get_backend_config
from torch.distributed.rendezvous import rendezvous as meet

from ..errors import MeshError
from ..seams import features
from ..torch_api import get_default_store
from .direct import connect
from .environment import launcher, local_device, rendezvous
from .group import TP_AXIS, TensorParallelGroup, bind_thread

LATE = timedelta(minutes=10)
"""Time for all ranks to start, as torchrun gives its own agents."""


def find_store() -> tuple[Store, int, int]:
    """The store where the ranks meet, the rank of this process, and the number of ranks, by a launcher's environment.

    Raises MeshError if the environment has no address of a store, or if it does not answer within LATE.
    """
    place = rendezvous()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with late_is_error(place["world_size"], list, f"no store at {address} within {LATE.total_seconds():.0f} s"):
        found: tuple[Store, int, int] = next(meet("env://", timeout=LATE / 2, **place))  # torch tries twice
    return found


def check_gpus(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Raise MeshError on all ranks if two of them have the same GPU, unless NCCL was told to take that. Collective.

    NCCL itself raises on some ranks, after which the others wait: https://github.com/NVIDIA/nccl, `src/init.cc`.
    """
    several = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"  # since NCCL 2.30
    gpu = "" if several else str(torch.cuda.get_device_properties(device).uuid)
    gpus = exchange(store, "gpu", gpu, rank, size)
    for peer, gpu in enumerate(gpus):
        if gpu and gpus.index(gpu) < peer:
            raise MeshError(
                f"rank {peer}",
                got=f"the same GPU as rank {gpus.index(gpu)} ({gpu})",
                expected="a GPU of its own, for NCCL",
                fix="Start as many ranks on a machine as it has GPUs (-n, --nproc-per-node), or export "
                "CUDA_VISIBLE_DEVICES= for ranks on the CPU.",
            )


def exchange(store: Store, key: str, value: Any, rank: int, size: int) -> list[Any]:
    """The `value` of every rank, as JSON gives it back.

    Raises MeshError if a rank has not called this within LATE, or if the store is lost.
    """
    keys = [f"{key} {peer}" for peer in range(size)]

    def missing() -> list[int]:
        return [peer for peer in range(size) if not store.check(keys[peer : peer + 1])]

    with late_is_error(size, missing):
        store.set(keys[rank], json.dumps(value))
        store.wait(keys, LATE)
        return [json.loads(store.get(key)) for key in keys]


@contextmanager
def late_is_error(
    size: int, missing: Callable[[], list[int]], lost: str = "no answer of the store at which they meet"
) -> Iterator[None]:
    """Raise MeshError, with the ranks that are `missing`, or else that the store is `lost`, if a call of it fails."""
    try:
        yield
    except RuntimeError as error:  # a DistStoreError does not say which rank is late
        late: list[int] = []
        with suppress(RuntimeError):
            late = missing()
        got = f"no sign of rank {', '.join(map(str, late))} of {size} within {LATE.total_seconds():.0f} s"
        where = "that rank's machine" if late else "the machine on which torchrun was started first, or that of rank 0"
        raise MeshError(
            "the ranks",
            got=got if late else f"{lost}: {str(error).partition(chr(10))[0]}",
            expected="all of them to start",
            fix=f"Look for an error on {where}; start all machines again. A firewall has to admit all ports, and "
            "MASTER_ADDR has to be a name or an address that each machine reaches.",
        ) from error


def join(device_mesh: DeviceMesh | None = None) -> TensorParallelGroup:
    """Join the tensor-parallel group: from `device_mesh`, a running process group, or a launcher's environment.

    Starts the process group if none is running and a launcher (torchrun, srun, mpirun) started this process: gloo on
    CPU; gloo and nccl on CUDA, with the device bound before the group starts. Without a launcher the group is one
    process without a process group.

    Raises MeshError if `device_mesh` has no `tp` axis (and is not 1-D) or fails `check_ranks`, if a node has more ranks
    than GPUs or two ranks of NCCL have the same, or if the environment has no rendezvous address.
    """
    if device_mesh is None:
        if launcher() is None and not dist.is_initialized():
            return TensorParallelGroup(None, 0, 1, local_device(_default_device_type()))
        device_type = _start_process_group()
        device_mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(TP_AXIS,))
    axis = _tp_axis(device_mesh)
    device = local_device(axis.device_type)
    bind_thread(device)
    group = axis.get_group()
    if device.type == "cuda" and "cuda:nccl" in get_backend_config(group):  # which starts with the first collective
        store = PrefixStore(f"tp_transformers/{axis.mesh.tolist()}", get_default_store())
        check_gpus(store, group.rank(), group.size(), device)
    prepare(group, device)
    return TensorParallelGroup.of_mesh(axis, device, mesh=device_mesh)


def prepare(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Set up what collectives need that a rank may not reach which fails alone. Collective.

    NCCL makes the communicator of a group that is not bound to a device in the first collective, and meanwhile cannot
    be aborted.
    """
    connect(process_group)
    if process_group.size() > 1 and "cuda:nccl" in get_backend_config(process_group):
        dist.all_reduce(torch.zeros(1, device=device), group=process_group)
        torch.get_device_module(device.type).synchronize(device)


def check_size(group: TensorParallelGroup, tp_size: int | None) -> None:
    """Raise MeshError if `tp_size` is neither None nor the number of ranks."""
    if tp_size is None or tp_size == group.size:
        return
    raise MeshError(
        "tp_size",
        got=repr(tp_size),
        expected=f"{group.size}, the number of ranks that were started",
        fix=f"Launch with tp-transformers run -n {tp_size}, or torchrun --nproc-per-node {tp_size}. For several copies "
        "of the model, pass device_mesh= with a tp axis of that length, or fsdp_size or dp_replicate_size in a "
        "DistributedConfig."
        if isinstance(tp_size, int) and tp_size > 0
        else "Leave it out: it is only held against the number of ranks.",
    )


def check_ranks(device_mesh: DeviceMesh) -> None:
    """Raise MeshError if this process is not in the mesh, or the ranks do not ascend along every axis.

    torch sorts the ranks of a process group, but places the shards of a DTensor in the order of the mesh.
    """
    ranks = device_mesh.mesh
    if device_mesh.get_coordinate() is None:
        raise MeshError(
            "device_mesh",
            got=f"one of ranks {ranks.flatten().tolist()} on rank {dist.get_rank()}",
            expected="one that this rank is in",
            fix="Call from_pretrained on the ranks of the mesh alone, or build it over all that were started.",
        )
    if any((ranks.diff(dim=dim) < 0).any() for dim in range(ranks.ndim)):
        raise MeshError(
            "device_mesh",
            got=f"ranks {ranks.tolist()}",
            expected="ranks that ascend along every axis",
            fix="Build it with init_device_mesh; to exchange axes, exchange their names.",
        )


def _tp_axis(device_mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            "device_mesh",
            got=repr(device_mesh),
            expected="a torch.distributed.device_mesh.DeviceMesh",
            fix="Leave it out to use all ranks, or build one with init_device_mesh.",
        )
    check_ranks(device_mesh)
    names = device_mesh.mesh_dim_names or ()
    if TP_AXIS in names:
        return device_mesh[TP_AXIS] if device_mesh.ndim > 1 else device_mesh
    if device_mesh.ndim == 1:
        return device_mesh
    raise MeshError(
        "device_mesh",
        got=f"{device_mesh.ndim} axes named {names or 'nothing'}",
        expected=f"one axis, or an axis named {TP_AXIS!r}",
        fix='Build it with init_device_mesh(type, shape, mesh_dim_names=("dp", "tp")).',
    )


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _start_process_group() -> str:
    """Start the default process group unless it is running; returns the device type for meshes."""
    if dist.is_initialized():
        return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
    device = local_device(_default_device_type())
    bind_thread(device)
    with ExitStack() as stack:
        uses = [stack.enter_context(feature.around_start()) for feature in features().values()]
        store, rank, size = find_store()
        for use in uses:
            store = use(store, rank, size)
        store = PrefixStore("default_pg", store)
        if device.type == "cuda":
            check_gpus(store, rank, size, device)
        # Gloo beside NCCL: FSDP2 with CPU offload has parameters on the CPU.
        init("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store, rank, size, device)
    atexit.register(_stop_process_group)
    return device.type


def init(backend: str, store: Store, rank: int, size: int, device: torch.device) -> None:
    """Start the default process group, bound to a GPU where torch can split it into the groups of a mesh.

    torch 2.8 splits no group of two backends, and 2.9 lets gloo's parts meet at the same keys of the store.
    """
    binds = device.type != "cpu" and torch.__version__ >= (2, 10)  # type: ignore[operator]  # a TorchVersion
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device if binds else None)


def _stop_process_group() -> None:
    """Destroy the process group at exit: torch warns of a remaining group, and NCCL may hang on it."""
    with suppress(Exception):
        forget_graphs()
    if dist.is_initialized():
        dist.destroy_process_group()
    _await_gloo_threads()


def forget_graphs() -> None:
    """Drop all that torch.compile has compiled, if there is a GPU: CUDA graphs hold the communicators of NCCL.

    A replay on an aborted communicator fails or hangs. And NCCL ends no communicator before the graphs that hold it:
    its abort and its destruction wait for them (`commDestroySync` in `src/init.cc` of https://github.com/NVIDIA/nccl).
    """
    if torch.cuda.is_initialized() and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
        gc.collect()


def _await_gloo_threads(seconds: float = 5.0) -> None:
    """Wait until gloo's threads are idle, at most `seconds`.

    After a collective they take the GIL to release its tensors. Python ends a thread that requests the GIL while the
    interpreter finalizes, and C++ then aborts the process ("terminate called without an active exception").
    Destroying the group does not stop them, since models and meshes still hold references to it.
    """
    deadline, before = time.monotonic() + seconds, None
    switches = _context_switches("pt_gloo_runloop")
    while (switches is None or switches != before) and time.monotonic() < deadline:
        time.sleep(0.01)  # without the GIL
        before, switches = switches, _context_switches("pt_gloo_runloop")


def _context_switches(name: str) -> list[str] | None:
    """Context switches of this process' threads called `name`; None while one is running. Empty without /proc.

    A thread that waits for the GIL wakes every 5 ms, so its count changes.
    """
    counts = []
    for thread in Path("/proc/self/task").glob("*"):
        try:
            status = (thread / "status").read_text()
        except OSError:  # it has ended
            continue
        if status.startswith(f"Name:\t{name}\n"):
            if "State:\tR" in status:
                return None
            counts += [line for line in status.splitlines() if "ctxt_switches" in line]
    return counts


def ranks_of_copies(mesh: DeviceMesh, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of a model, in the order of the `tp` axis."""
    both = both_axes(mesh, axis)
    ranks = both.mesh if (both.mesh_dim_names or ())[0] == axis else both.mesh.T
    return tuple(map(tuple, ranks.tolist()))


def both_axes(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the submesh of `axis` and `tp`, in the order of `mesh`."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name in (axis, TP_AXIS))]
