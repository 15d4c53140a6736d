"""Cores of ranks on machines with several NUMA nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cores import ALL
from tp_transformers.features.run import rank as numa


def machine(folder: Path, *lists: str) -> Path:
    """The nodes of a machine as Linux lists them."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    return folder


@pytest.mark.parametrize(
    ("lists", "size", "expected"),
    [
        (["0-3", "4-7"], 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (["0-1,4-5", "2-3,6-7"], 4, [{0, 1, 4, 5}, {0, 1, 4, 5}, {2, 3, 6, 7}, {2, 3, 6, 7}]),
        (["0-3", "4-7"], 3, [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}]),
        (["0-3", "4-7", ""], 1, [{0, 1, 2, 3}]),  # a node with memory alone
        (["0-7"], 2, [set(), set()]),
        (["8-9", "0-7"], 2, [set(), set()]),  # not allowed to this process
        ([*["9"] * 2, "0", *["9"] * 8, "1"], 2, [{0}, {1}]),  # node 11 follows node 2
    ],
)
def test_neighbouring_ranks_share_a_node(tmp_path, lists, size, expected) -> None:
    nodes = machine(tmp_path, *lists)
    assert [numa.cores_of(rank, size, set(range(8)), nodes) for rank in range(size)] == expected


@pytest.mark.skipif(len(ALL) < 2, reason="has one core")
def test_a_rank_keeps_to_its_cores(tmp_path) -> None:
    first, second, *_ = ALL
    machine(tmp_path, str(first), str(second))
    program = (
        f"import os; os.sched_setaffinity(0, {ALL})\n"
        "from pathlib import Path; from tp_transformers.features.run import rank as numa\n"
        f"numa.cores_of.__defaults__ = (Path({str(tmp_path)!r}),); numa._GPU = Path('/nowhere')\n"
        "numa.bind_rank(); print(os.sched_getaffinity(0))"
    )
    for rank, core in enumerate((first, second)):
        environment = {**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"{{{core}}}\n"
