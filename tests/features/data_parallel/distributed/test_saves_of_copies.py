"""Saves of a model with data-parallel copies: the files are there when the call returns, on the ranks of all copies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

import tp_transformers
from tests.support.models import load
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers.checkpoint.saving.folder import SaveFolder
from tp_transformers.errors import CheckpointError

pytestmark = pytest.mark.distributed

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def start(folder: str, mode: Any, adapted: bool = False) -> Any:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder, device_mesh=mesh)
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    return tp_transformers.data_parallel(model, mesh, mode=mode)


def sees_files(folder: str, saved: str, mode: str, adapted: bool) -> bool:
    """Run on every rank: whether the files are there; the rank that writes them is slow."""
    model, put = start(folder, mode, adapted), SaveFolder.put

    def put_late(self: SaveFolder, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return put(self, *args, **kwargs)

    try:
        SaveFolder.put = put_late  # type: ignore[method-assign]
        model.save_pretrained(saved)
    finally:
        SaveFolder.put = put  # type: ignore[method-assign]
    return Path(saved, ADAPTER if adapted else WEIGHTS).is_file()


@pytest.mark.parametrize(("mode", "adapted"), wide([("shard", False), ("replicate", True), ("replicate", False)], 2))
def test_files_are_there_for_all_copies(pool: Pool, cases: Any, tmp_path: Path, mode: str, adapted: bool) -> None:
    assert pool.run(4, sees_files, cases(9, 3).folder, str(tmp_path / "saved"), mode, adapted) == [True] * 4


def save_on_a_file(folder: str, saved: str) -> None:
    """Run on every rank: a save to a path that is a file."""
    start(folder, "replicate").save_pretrained(saved)


def test_all_copies_raise_the_error_of_the_first(pool: Pool, cases: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("")
    assert pool.error(4, save_on_a_file, cases(9, 3).folder, str(tmp_path / "saved")).startswith(
        CheckpointError.__name__
    )
