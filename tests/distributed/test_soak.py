"""Five hundred loads, generations, saves and failures in one pair of processes leave nothing behind."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tp_transformers
from tests.support.models import MASK, PROMPTS, load
from tp_transformers import CheckpointError, PlanError
from tp_transformers.loading import load as loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROUNDS = 500
EVERY = 50

GROWTH = 24 << 20
"""Bytes of memory in 400 rounds: an allocator that settles; a tiny model leaked in each would be 100 MB."""


def good(folder: str, scratch: str) -> None:
    model = load(folder)
    model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=3, do_sample=False)


def saves(folder: str, scratch: str) -> None:
    load(folder).save_pretrained(f"{scratch}/whole", max_shard_size="60KB")


def saves_sharded(folder: str, scratch: str) -> None:
    tp_transformers.save_sharded(load(folder), f"{scratch}/sharded")
    load(f"{scratch}/sharded")


def bad_plan(folder: str, scratch: str) -> None:
    with pytest.raises(PlanError):
        load(folder, tp_plan={"model.layers.*.nothing": "colwise"})


def missing_file(folder: str, scratch: str) -> None:
    with pytest.raises(CheckpointError):
        load(f"{scratch}/missing")


def failing_rank(folder: str, scratch: str) -> None:
    """Rank 1 raises where parameters get their places, in the middle of the load."""
    place = loader.place

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    if dist.get_rank() == 1:
        loader.place = raising
    try:
        with pytest.raises((tp_transformers.RemoteRankError, OSError)):
            load(folder)
    finally:
        loader.place = place


def refused_save(folder: str, scratch: str) -> None:
    model = load(folder)
    with pytest.raises(CheckpointError):
        model.save_pretrained(f"{scratch}/file")


JOBS = [good, saves, bad_plan, saves_sharded, missing_file, good, failing_rank, refused_save]


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    links = [os.readlink(path) for path in _descriptors() if os.path.lexists(path)]
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "memory": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def _descriptors() -> list[str]:
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]


def soak(folder: str, scratch: str, rounds: int) -> list[dict[str, int]]:
    found = []
    load(folder)
    for number in range(rounds):
        JOBS[number % len(JOBS)](folder, scratch)
        if (number + 1) % EVERY == 0:
            found.append(held())
    return found


def test_nothing_grows(pool: Any, cases: Any, tmp_path: Path) -> None:
    folder = cases(9, 3).folder
    shutil.copytree(folder, tmp_path / "missing")
    next((tmp_path / "missing").glob("*-00002-of-*")).unlink()
    (tmp_path / "file").write_text("no folder")
    for rank, found in enumerate(pool.run(2, soak, folder, str(tmp_path), ROUNDS, timeout=1800)):
        warm, last = found[1], found[-1]
        for kind in warm:
            print(f"rank {rank}, {kind}: {found[0][kind]} {warm[kind]} ... {last[kind]}")
        assert last["memory"] - warm["memory"] < GROWTH
        assert {**last, "memory": 0} == {**warm, "memory": 0}
