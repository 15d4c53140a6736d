"""The cores of a rank on a machine with several NUMA nodes: those of one node, beside its memory."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from pathlib import Path

NODES = Path("/sys/devices/system/node")
"""Where Linux lists the cores of each node."""
_GPU = Path("/dev/nvidiactl")


def bind_rank() -> None:
    """Bind this process, a rank that torchrun started, to the cores of one NUMA node, before it starts threads.

    Nothing is done where there is one node, or a GPU, which is near a node of its own (`torchrun --numa-binding`).
    """
    rank, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and not _GPU.exists() and hasattr(os, "sched_setaffinity"):
        cores = cores_of(int(rank), int(size), os.sched_getaffinity(0))
        if cores:
            os.sched_setaffinity(0, cores)


def cores_of(rank: int, size: int, allowed: AbstractSet[int], nodes: Path = NODES) -> set[int]:
    """The allowed cores of the node of rank `rank` of `size` on this machine; none where all are of one node.

    Neighbouring ranks share a node, and nodes have as many ranks as each other where they can.
    """
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    found = [cores for path in lists if (cores := _cores(path.read_text()) & allowed)]
    return found[rank * len(found) // size] if len(found) > 1 else set()


def _cores(text: str) -> set[int]:
    """Those of a list such as "0-3,8"."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
