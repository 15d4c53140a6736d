"""Five hundred loads, generations, saves and failures in one pair of processes leave nothing behind."""

import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tp_transformers
from tests.features.watch.distributed.test_watch import BoomError, forward, grace
from tests.support.models import MASK, PROMPTS, load, logits_of
from tp_transformers import CheckpointError, PlanError, RemoteRankError, renew_process_group
from tp_transformers.features.watch.poller import POLLER
from tp_transformers.loading import request

pytestmark = pytest.mark.slow

ROUNDS = 63
"""Rounds of the 8 jobs below: 504 of them."""
EVERY = 7
"""Rounds between two looks at what the process holds. The look after 14 rounds counts as warm."""
GROWTH = 16 << 20
"""Bytes of memory in 49 rounds, for an allocator that settles. A load of a tiny model allocates more than 1 MB."""
GRACE = 0.1
"""Seconds in place of those that the ranks usually have to fail alike, where one fails alone."""
SECONDS = 900.0
"""Time limit of all rounds, on a machine that is busy."""


@dataclass
class Soak:
    """What the jobs of one rank work with."""

    folder: str
    """The checkpoint."""
    scratch: str
    """A folder with `missing`, a checkpoint that lacks a file, and `file`, which is no folder."""
    model: Any
    """A model that lives from the first round to the last."""
    expected: torch.Tensor = field(init=False)
    """Its logits."""
    bad: int = 0
    """The rank that fails alone."""

    def __post_init__(self) -> None:
        self.expected = self.logits()

    def logits(self) -> torch.Tensor:
        return logits_of(self.model)


def good(soak: Soak) -> None:
    model = load(soak.folder)
    model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=2, do_sample=False)
    model.save_pretrained(f"{soak.scratch}/whole", max_shard_size="60KB")


def saves_sharded(soak: Soak) -> None:
    tp_transformers.save_sharded(soak.model, f"{soak.scratch}/sharded")
    load(f"{soak.scratch}/sharded")


def bad_plan(soak: Soak) -> None:
    with pytest.raises(PlanError):
        load(soak.folder, tp_plan={"model.layers.*.nothing": "colwise"})


def missing_file(soak: Soak) -> None:
    with pytest.raises(CheckpointError):
        load(f"{soak.scratch}/missing")


def refused_save(soak: Soak) -> None:
    with pytest.raises(CheckpointError):
        soak.model.save_pretrained(f"{soak.scratch}/file")


def load_that_fails_on_one_rank(soak: Soak) -> None:
    """A rank cannot read."""
    fails = mock.patch.object(request, "read", side_effect=OSError(5, "Input/output error"))
    with (
        fails if dist.get_rank() == soak.bad else nullcontext(),
        pytest.raises(RemoteRankError, match=f"rank {soak.bad}: OSError"),
    ):
        load(soak.folder)


def forward_that_fails_alike(soak: Soak) -> None:
    with pytest.raises(BoomError):
        forward(soak.model, True)
    assert torch.equal(soak.logits(), soak.expected)


def forward_that_fails_on_one_rank(soak: Soak) -> None:
    is_bad = dist.get_rank() == soak.bad
    with grace(GRACE), pytest.raises(BoomError if is_bad else RemoteRankError):
        forward(soak.model, is_bad)
    renew_process_group(soak.model)
    assert torch.equal(soak.logits(), soak.expected)


JOBS: list[Callable[[Soak], None]] = [
    good,
    bad_plan,
    saves_sharded,
    forward_that_fails_on_one_rank,
    missing_file,
    forward_that_fails_alike,
    load_that_fails_on_one_rank,
    refused_save,
]


def settled() -> dict[str, int]:
    """What this process holds: the least of some looks, since the ends of a connection close one after the other."""
    gc.collect()
    POLLER.soon()
    dist.barrier()
    looks = []
    for _ in range(10):
        looks.append(held())
        time.sleep(0.05)
    return {kind: min(look[kind] for look in looks) for kind in looks[0]}


def held() -> dict[str, int]:
    """What this process holds just now."""
    descriptors = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    links = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    statm = Path("/proc/self/statm").read_text().split()
    world = dist.distributed_c10d._world
    return {
        "memory": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "process groups": len(world.pg_map) + len(world.pg_names) + len(world.pg_group_ranks) + len(world.pg_to_tag),
        "polled": len(POLLER._polled),
        "prefixes of keys": len(_prefixes()),
    }


def _prefixes() -> list[Any]:
    """The stores that the store of the process group lies in."""
    stores: list[Any] = [dist.distributed_c10d._get_default_store()]
    while hasattr(stores[-1], "underlying_store"):
        stores.append(stores[-1].underlying_store)
    return stores


def soak(folder: str, scratch: str, rounds: int) -> list[dict[str, int]]:
    """Run on every rank: what it holds after every few rounds."""
    soaked, found = Soak(folder, scratch, load(folder)), []
    for number in range(rounds):
        soaked.bad = number % 2
        for job in JOBS:
            job(soaked)
        if (number + 1) % EVERY == 0:
            found.append(settled())
    return found


def test_nothing_grows(pool, cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    shutil.copytree(folder, tmp_path / "missing")
    next((tmp_path / "missing").glob("*-00002-of-*")).unlink()
    (tmp_path / "file").write_text("no folder")
    for rank, found in enumerate(pool.run(2, soak, folder, str(tmp_path), ROUNDS, timeout=SECONDS)):
        warm, last = found[1], found[-1]
        for kind in warm:
            print(f"rank {rank}, {kind}: {' '.join(str(look[kind]) for look in found)}")
        assert last["memory"] - warm["memory"] < GROWTH
        assert {**last, "memory": 0} == {**warm, "memory": 0}
