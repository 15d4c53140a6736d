"""Ranks as their launcher numbers them: the only reader of RANK, LOCAL_RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, ..."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MeshError
from ..logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Launcher:
    """The environment variables of launchers that give a process its rank."""

    name: str
    rank: str
    size: str
    """Number of ranks that were started together."""
    local_rank: str
    """Number of the rank among those of its node."""
    local_size: str | None
    """Number of ranks on the node; None where the launcher has no plain number for it."""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    TORCHRUN,
    # Not SLURM_NTASKS, which a batch script has too, though it is one process.
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPICH's or Intel's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("Cray's mpirun", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""The first whose variables are set counts: torchrun may be started by one of the others."""


def launcher() -> Launcher | None:
    """The launcher that started this process among others; None for a process by itself."""
    for each in LAUNCHERS:
        rank, size = _number(each.rank), _number(each.size)
        if rank is not None and size is not None and (size > 1 or each == TORCHRUN):
            return each
    return None


def rendezvous() -> dict[str, Any]:
    """The rank and the size that `init_process_group` takes, for a process that a launcher started.

    Raises MeshError where the ranks have no address to meet.
    """
    found = launcher()
    assert found is not None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise MeshError(
            f"ranks of {found.name}",
            got=f"no {' and no '.join(missing)} in the environment",
            expected="the address at which they meet",
            fix="Export MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, or use torchrun.",
        )
    return {"rank": int(os.environ[found.rank]), "world_size": int(os.environ[found.size])}


def local_rank(rank: int) -> int | None:
    """Number of this process, which is `rank` of all, among those of its node; None without a launcher.

    Launchers other than torchrun are believed where they give it the same rank: a script that one of them started may
    have started its ranks itself.
    """
    for each in LAUNCHERS:
        local = _number(each.local_rank)
        if local is not None and (each == TORCHRUN or _number(each.rank) == rank):
            return local
    return None


def local_size() -> int | None:
    """Number of ranks on this node; None without a launcher that says so."""
    found = launcher()
    sizes = (_number(each.local_size) for each in LAUNCHERS if found is not None and each.rank == found.rank)
    return next((size for size in sizes if size is not None), None)


def node_name() -> str:
    """A name that processes have in common where they share a machine and a host name, as containers may not."""
    return f"{socket.gethostname()} {machine_name()}"


def machine_name() -> str:
    """A name that processes have in common where one kernel runs them; "" where the system has none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def local_device(device_type: str) -> torch.device:
    """The device of this rank: the GPU of its number on its node, or the only one that it can see.

    Without that number, it is the device that the process group was bound to, or the current one unless that is the
    first; else ranks take the GPUs of their node by turns, with a warning. A process by itself takes the current one.

    Raises MeshError where a node has more ranks than devices.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    count, started, found = module.device_count(), dist.is_initialized(), launcher()
    if count <= 1:
        return torch.device(device_type, 0)
    rank = dist.get_rank() if started else int(os.environ[found.rank]) if found is not None else 0
    local = local_rank(rank)
    if local is None:
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.type == device_type and bound.index is not None:
            return torch.device(device_type, bound.index)
        local = module.current_device()
        if not local and (started or found is not None):
            local = rank % count
            if rank == 0:
                logger.warning(
                    "no launcher tells which ranks share a node: rank r takes GPU r %% %d; where nodes have other "
                    "numbers of ranks, export LOCAL_RANK, the number of each rank on its node",
                    count,
                )
    if local >= count:
        raise MeshError(
            "tensor-parallel ranks",
            got=f"local rank {local} on a node with {count} {device_type} devices",
            expected="at most one rank a device",
            fix=f"Launch with torchrun --nproc-per-node {count}.",
        )
    return torch.device(device_type, local)


def _number(name: str | None) -> int | None:
    text = os.environ.get(name or "", "")
    return int(text) if text.isdecimal() else None
