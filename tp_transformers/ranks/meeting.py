"""The store at which the ranks of a launch meet, before they have a process group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous as meet

from ..errors import MeshError
from .environment import rendezvous

LATE = timedelta(minutes=10)
"""Time for all ranks to start, as torchrun gives its own agents."""


def find_store() -> tuple[Store, int, int]:
    """The store where the ranks meet, the rank of this process, and the number of ranks, by a launcher's environment.

    Raises MeshError if the environment has no address of a store, or if it does not answer within LATE.
    """
    place = rendezvous()
    try:
        found: tuple[Store, int, int] = next(meet("env://", timeout=LATE / 2, **place))  # torch tries twice
        return found
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise MeshError(
            f"rank {place['rank']}",
            got=f"no store at {address}: {str(error).splitlines()[0]}",
            expected=f"one within {LATE.total_seconds():.0f} s, made by rank 0, or by torchrun on the first machine",
            fix="Start all machines again; MASTER_ADDR has to be a name or an address that each of them reaches.",
        ) from error


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
def late_is_error(size: int, missing: Callable[[], list[int]]) -> Iterator[None]:
    """Raise MeshError, with the ranks that are `missing`, if a call of the store fails."""
    try:
        yield
    except RuntimeError as error:  # a DistStoreError does not say which rank is late
        late, where = [], "the machine on which torchrun was started first, or that of rank 0"
        with suppress(RuntimeError):
            late = missing()
            where = "that rank's machine"
        got = f"no sign of rank {', '.join(map(str, late))} of {size} within {LATE.total_seconds():.0f} s"
        raise MeshError(
            "the ranks",
            got=got if late else f"no answer of the store at which they meet: {error}",
            expected="all of them to start",
            fix=f"Look for an error on {where}; start all machines again. A firewall has to admit all ports.",
        ) from error
