"""Ranks in the launcher's environment: the only reader of RANK, LOCAL_RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, ..."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
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
    """A launcher's environment variables for the rank of a process."""

    name: str
    rank: str
    size: str
    """World size."""
    local_rank: str
    """Index of the rank on its node."""
    local_size: str | None
    """Number of ranks on the node; None if the launcher does not set it. srun writes "2(x3)" for two on each of 3."""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    TORCHRUN,
    # Not SLURM_NTASKS: a batch script has it too, though it is one process.
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
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
"""By precedence: torchrun may itself be started by one of the others."""


def launcher() -> Launcher | None:
    """The launcher that started this process; None for a process without other ranks."""
    for candidate in LAUNCHERS:
        rank, size = _number(candidate.rank), _number(candidate.size)
        if rank is not None and size is not None and (size > 1 or candidate == TORCHRUN):
            return candidate
    return None


def rendezvous() -> dict[str, Any]:
    """`rank` and `world_size` for `init_process_group`, for a process that a launcher started.

    Raises MeshError if MASTER_ADDR or MASTER_PORT is not set.
    """
    current = launcher()
    assert current is not None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise MeshError(
            f"ranks of {current.name}",
            got=f"no {' and no '.join(missing)} in the environment",
            expected="the address at which they meet",
            fix="Export MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, or use torchrun.",
        )
    return {"rank": int(os.environ[current.rank]), "world_size": int(os.environ[current.size])}


def local_rank(rank: int) -> int | None:
    """Local rank of this process, which has global rank `rank`; None without a launcher.

    Variables of launchers other than torchrun count only if their rank equals `rank`: the launcher may have started a
    script that started the ranks itself.
    """
    for candidate in LAUNCHERS:
        local = _number(candidate.local_rank)
        if local is not None and (candidate == TORCHRUN or _number(candidate.rank) == rank):
            return local
    return None


def local_size() -> int | None:
    """Number of ranks on this node; None without a launcher that sets it."""
    current = launcher()
    sizes = (
        _number(candidate.local_size)
        for candidate in LAUNCHERS
        if current is not None and candidate.rank == current.rank
    )
    return next((size for size in sizes if size is not None), None)


def node_name() -> str:
    """A name that is equal for processes with the same machine and host name (containers of a machine may differ)."""
    return f"{socket.gethostname()} {machine_name()}"


def host_of(node: str) -> str:
    """The host name in a `node_name`."""
    return node.split()[0]


def firsts_of(nodes: Sequence[str]) -> list[int]:
    """The first rank of each node. `nodes`: the `node_name` of each rank."""
    return sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())


def machine_name() -> str:
    """The boot id, equal for processes on the same kernel; "" if the system has none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def local_device(device_type: str) -> torch.device:
    """The device of this rank: the GPU with the index of its local rank, or the only visible one.

    Without a local rank: the device that the process group is bound to, else the current device if it is not device 0,
    else GPU `rank % count`, with a warning. A process without other ranks takes the current device.

    Raises MeshError if a node has more ranks than devices.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    count, started, current = module.device_count(), dist.is_initialized(), launcher()
    if count <= 1:
        return torch.device(device_type, 0)
    rank = dist.get_rank() if started else int(os.environ[current.rank]) if current is not None else 0
    local = local_rank(rank)
    if local is None:
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.type == device_type and bound.index is not None:
            return torch.device(device_type, bound.index)
        local = module.current_device()
        if not local and (started or current is not None):
            local = rank % count
            if rank == 0:
                logger.warning(
                    "no launcher reports which ranks share a node: rank r takes GPU r %% %d; where nodes have other "
                    "numbers of ranks, export LOCAL_RANK, the number of each rank on its node",
                    count,
                )
    if local >= count:
        raise MeshError(
            "tensor-parallel ranks",
            got=f"local rank {local} on a node with {count} {device_type} devices",
            expected="at most one rank a device",
            fix=f"Launch with tp-transformers run -n {count}, or torchrun --nproc-per-node {count}.",
        )
    return torch.device(device_type, local)


def _number(name: str | None) -> int | None:
    text = re.sub(r"\(x\d+\)$", "", os.environ.get(name or "", ""))
    return int(text) if text.isdecimal() else None
