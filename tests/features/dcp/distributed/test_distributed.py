"""A distributed checkpoint that would run code on one rank is refused on all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.features.dcp.unit.test_distributed import Program, with_metadata
from tests.support.pool import Pool, WorkerError
from tp_transformers.checkpoint import load_distributed_checkpoint

pytestmark = pytest.mark.distributed


def read(folders: list[str]) -> float:
    dist.init_process_group("gloo")
    state = {"weight": torch.zeros(3)}
    load_distributed_checkpoint(state, folders[int(os.environ["RANK"])])
    return state["weight"].sum().item()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_rank_with_code_stops_all(pool: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=good)
    shutil.copytree(good, bad)
    with_metadata(bad, lambda metadata: setattr(metadata, "planner_data", Program(tmp_path / "ran")))
    assert pool.run(2, read, [str(good)] * 2) == [3.0, 3.0]
    with pytest.raises(WorkerError) as caught:
        pool.run(2, read, [str(good), str(bad)], timeout=60)
    kinds = {error.split(":")[0] for error in caught.value.errors.values()}
    assert kinds == {"CheckpointError"}
    assert len(set(caught.value.errors.values())) == 1
    assert not (tmp_path / "ran").exists()
