"""Ranks with copies of their own, as on several nodes: one checkpoint, or an error that names the file and the rank."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tp_transformers
from tests.support.models import bytes_read, headers, held, load
from tests.support.needs import needs
from tests.support.pool import WorkerError
from tp_transformers.features.machines.sameness import BLOCK_BYTES, BLOCKS

FILE = "model-00004-of-00007.safetensors"


def load_own(folders: list[str]) -> dict[str, Any]:
    """Every rank loads a folder of its own."""
    folder = folders[int(os.environ["RANK"])]
    model = load(folder)
    report = model.tp_report
    return {"sampled": report.sampled, "read": bytes_read(model), "needed": held(model) + headers(folder)}


def copies(folder: str, tmp_path: Path, count: int = 2) -> list[str]:
    return [shutil.copytree(folder, tmp_path / f"node-{each}" / "model") for each in range(count)]


def another_fine_tune(folder: Path) -> None:
    """Other values, in files of the same sizes and headers."""
    path = folder / FILE
    save_file({name: value + 1e-3 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def another_header(folder: Path) -> None:
    """Another header of the same length."""
    path = folder / FILE
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert b'"format":"pt"' in data[:length]
    path.write_bytes(data[:length].replace(b'"format":"pt"', b'"format":"tp"') + data[length:])


@pytest.mark.parametrize(
    ("change", "what"), [(another_fine_tune, "content"), (another_header, "header")], ids=["content", "header"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_another_checkpoint_on_one_node_is_one_error(pool, cases, tmp_path, change, what, rank) -> None:
    folders = copies(cases(9, 3).folder, tmp_path)
    before = (Path(folders[rank]) / FILE).stat().st_size
    change(Path(folders[rank]))
    assert (Path(folders[rank]) / FILE).stat().st_size == before
    error = pool.error(2, load_own, folders, timeout=60)
    start = f"CheckpointError: checkpoint file {folders[0]}/{FILE}: got another {what} on rank 1 ({folders[1]}/{FILE}) "
    assert error.startswith(start + "than on rank 0, expected the same on all ranks.")


def test_copies_are_sampled_once_each_and_one_copy_never(pool, cases, tmp_path) -> None:
    """What is sampled is counted by itself: each rank still reads its own bytes and no others."""
    folder = cases(9, 3).folder
    files = sorted(Path(folder).glob("*.safetensors"))
    most = sum(min(BLOCKS, -(-file.stat().st_size // BLOCK_BYTES)) * BLOCK_BYTES for file in files)
    here, there = copies(folder, tmp_path)
    for folders, total in (([here] * 3, 0), ([here, there, here], 2 * most)):
        for _ in range(2):  # a second load finds the same
            results = pool.run(3, load_own, folders)
            assert sum(result["sampled"] for result in results) == total
            assert all(result["read"] == result["needed"] for result in results)
    assert all(result["sampled"] < most for result in (results[0], results[2])), "ranks of one node take turns"


def test_commits_of_the_cache_are_compared(pool, cases, tmp_path) -> None:
    """Two revisions with the same weights may differ in what the config says."""
    folders = []
    for node, commit in enumerate(("a" * 40, "b" * 40)):
        folder = tmp_path / f"node-{node}" / "models--org--model" / "snapshots" / commit
        folders.append(str(shutil.copytree(cases(9, 3).folder, folder)))
    with pytest.raises(WorkerError, match=r"got another commit on rank 1 \(.*/snapshots/bbb"):
        pool.run(2, load_own, folders, timeout=60)


@needs("presharded")
def test_a_sharded_copy_that_was_changed(pool, cases, tmp_path) -> None:
    """At another size than it was saved at, ranks read parts of the same files."""
    pool.run(2, save_sharded, cases(9, 3).folder, str(tmp_path / "saved"))
    folders = copies(str(tmp_path / "saved"), tmp_path, 3)
    assert sum(result["sampled"] for result in pool.run(3, load_own, folders)) > 0
    changed = next(Path(folders[2]).glob("rank-00001-*"))
    data = changed.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    changed.write_bytes(data[:start] + bytes(len(data) - start))
    with pytest.raises(WorkerError, match=r"checkpoint file .*rank-00001-.*: got another content on rank 2"):
        pool.run(3, load_own, folders, timeout=60)


def save_sharded(folder: str, to: str) -> None:
    tp_transformers.save_sharded(load(folder), to)
