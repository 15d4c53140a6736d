"""A rank of `tp-transformers run`: it runs a script as `-m tp_transformers` does, and ends with torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path

from ...__main__ import main
from .command import AGENT, NUMA
from .errors import keep_errors
from .launch import end_with_parent

NODES = Path("/sys/devices/system/node")
"""Folder in which Linux lists the cores of each node."""
_GPU = Path("/dev/nvidiactl")


def bind_rank() -> None:
    """Bind this process, a rank of torchrun, to the cores of one NUMA node. Call it before threads start.

    No-op with one node, or with a GPU, whose nearest node torchrun knows (`torchrun --numa-binding`).
    """
    rank, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and not _GPU.exists() and hasattr(os, "sched_setaffinity"):
        cores = cores_of(int(rank), int(size), os.sched_getaffinity(0))
        if cores:
            os.sched_setaffinity(0, cores)


def cores_of(rank: int, size: int, allowed: AbstractSet[int], nodes: Path = NODES) -> set[int]:
    """The allowed cores of the NUMA node for local rank `rank` of `size`; empty if all are on one node.

    Consecutive ranks share a node; ranks are spread evenly over the nodes.
    """
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    per_node = [cores for path in lists if (cores := _cores(path.read_text()) & allowed)]
    return per_node[rank * len(per_node) // size] if len(per_node) > 1 else set()


def _cores(text: str) -> set[int]:
    """Parse a list of cores such as "0-3,8"."""
    spans = (item.partition("-") for item in text.strip().split(",") if item)
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


if __name__ == "__main__":
    if agent := os.environ.pop(AGENT, None):  # the rank's own processes do not inherit the variable
        end_with_parent(parent=int(agent))
    if os.environ.get(NUMA) == "auto":
        bind_rank()
    with keep_errors():
        main(sys.argv[1:])
