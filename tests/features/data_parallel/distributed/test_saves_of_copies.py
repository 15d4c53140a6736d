"""Saves of a model with data-parallel copies: the files are there when the call returns, on the ranks of all copies."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
from peft import LoraConfig, get_peft_model

import tp_transformers
from tests.distributed.strategies.test_full_tensors import check_memory
from tests.support.models import load
from tests.support.on_ranks import on_ranks, refused
from tests.support.tiers import wide
from tests.support.training import mesh_of
from tp_transformers.checkpoint.saving.folder import SaveFolder
from tp_transformers.errors import CheckpointError
from tp_transformers.features.data_parallel.fsdp import PartOfShard

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def start(folder: str, mode: Any, adapted: bool = False) -> Any:
    mesh = mesh_of(2)
    model = load(folder, device_mesh=mesh)
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    return tp_transformers.data_parallel(model, mesh, mode=mode)


@pytest.mark.parametrize(("mode", "adapted"), wide([("shard", False), ("replicate", True), ("replicate", False)], 2))
@on_ranks(4)
def test_files_are_there_for_all_copies(folder, tmp_path, mode, adapted) -> None:
    """The rank that writes the files is slow."""
    model, put = start(folder, mode, adapted), SaveFolder.put

    def put_late(self: SaveFolder, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return put(self, *args, **kwargs)

    with mock.patch.object(SaveFolder, "put", put_late):
        model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / (ADAPTER if adapted else WEIGHTS)).is_file()


@on_ranks(4)
def test_all_copies_raise_the_error_of_the_first(folder, tmp_path) -> None:
    (tmp_path / "saved").write_text("")
    with refused(CheckpointError, "saved"):
        start(folder, "replicate").save_pretrained(tmp_path / "saved")


@pytest.mark.slow
@on_ranks(4)
def test_a_rank_holds_what_it_asked_for_and_a_few_boxes() -> None:
    check_memory(2, PartOfShard)
