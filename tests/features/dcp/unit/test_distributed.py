"""Distributed checkpoints that carry code, names of other files, or nothing that can be read."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tp_transformers import CheckpointError
from tp_transformers.checkpoint import load_distributed_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Program:
    """Writes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def state(value: float) -> dict[str, Any]:
    groups = [{"lr": value, "betas": (value, 0.5), "foreach": None, "name": "all"}]
    tensors = {"weight": torch.full((3, 2), value), "half": torch.full((5,), value, dtype=torch.bfloat16)}
    return {"model": tensors, "optimizer": {"param_groups": groups}, "step": int(value)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state(7), checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_it_reads_what_torch_reads(folder) -> None:
    mine, torchs = state(0), state(0)
    load_distributed_checkpoint(mine, folder)
    dcp.load(torchs, checkpoint_id=folder)
    assert mine["model"].keys() == torchs["model"].keys()
    assert all(torch.equal(mine["model"][name], value) for name, value in torchs["model"].items())
    assert (mine["optimizer"], mine["step"]) == (torchs["optimizer"], torchs["step"]) == (state(7)["optimizer"], 7)


def test_tensors_that_are_missing_are_torchs_error(folder) -> None:
    with pytest.raises(dcp.api.CheckpointException, match="another"):
        load_distributed_checkpoint({"another": torch.ones(2)}, folder)


def with_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_runs_code(folder, tmp_path) -> None:
    def program(metadata: Metadata) -> None:
        metadata.planner_data = Program(tmp_path / "ran")

    with_metadata(folder, program)
    mine = state(0)
    with pytest.raises(CheckpointError, match=r"checkpoint: got metadata that cannot be read .*Path\.touch"):
        load_distributed_checkpoint(mine, folder)
    assert not (tmp_path / "ran").exists()
    assert mine["step"] == 0
    dcp.load(mine, checkpoint_id=folder)
    assert (tmp_path / "ran").exists(), "torch's own reader runs it"


def test_a_value_that_runs_code(tmp_path) -> None:
    dcp.save({"step": Program(tmp_path / "ran")}, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="value step of a distributed checkpoint"):
        load_distributed_checkpoint({"step": 1}, tmp_path / "checkpoint")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("absolute", [False, True])
def test_files_outside_the_folder(folder, tmp_path, absolute) -> None:
    (file,) = folder.glob("*.distcp")
    shutil.move(file, tmp_path / "elsewhere")

    def redirect(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = str(tmp_path / "elsewhere") if absolute else "../elsewhere"

    with_metadata(folder, redirect)
    with pytest.raises(CheckpointError, match=r"elsewhere, outside the folder"):
        load_distributed_checkpoint(state(0), folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\x80\x04", b"not a pickle", pickle.dumps({"a": 1})])
def test_metadata_that_is_none(folder, content) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="metadata that cannot be read"):
        load_distributed_checkpoint(state(0), folder)
