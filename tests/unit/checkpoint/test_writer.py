"""Files are written in order, durably, and completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_transformers import CheckpointError
from tp_transformers.checkpoint.saving import save, writer
from tp_transformers.checkpoint.saving.writer import Writer
from tp_transformers.features.presharded.save import SummedWriter


def test_a_writer_writes_in_order(tmp_path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    writer = SummedWriter(tmp_path / "a.safetensors", tensors)
    with pytest.raises(RuntimeError, match="written at byte"):
        writer.write("b", tensors["b"])
    writer.close()
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("kind", [Writer, SummedWriter])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(kind, tmp_path, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(f"fsync {path.name} of {os.fstat(fd).st_size} bytes" if path.is_file() else f"fsync {path.name}/")
        fsync(fd)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    begun = kind(tmp_path / "file", {"a": torch.ones(500)})
    begun.write("a", torch.ones(500))
    begun.finish()
    size = (tmp_path / "file").stat().st_size
    assert done == [f"fsync file.partial of {size} bytes", "rename file.partial", f"fsync {tmp_path.name}/"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def full_disk() -> Iterator[None]:
    """Within the block files grow no more: only there, since pytest may write its own report to one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path) -> None:
    """Whether it is full when the file is laid out, or when what is buffered is written."""
    tensors = {"a": torch.ones(500), "b": torch.ones(500)}
    begun = SummedWriter(tmp_path / "begun.safetensors", tensors)
    begun.write("a", tensors["a"])
    with full_disk():
        begun.close()
        with pytest.raises(CheckpointError, match=r"new\.safetensors: got File too large"):
            SummedWriter(tmp_path / "new.safetensors", tensors)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_some_file_systems_cannot_sync_folders(tmp_path, monkeypatch, number) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError) if number == errno.EIO else contextlib.nullcontext():
        writer.sync_folder(tmp_path)


def test_a_save_function_is_left_out_and_said(caplog) -> None:
    with caplog.at_level("INFO", save.logger.name):
        save._check_arguments({"safe_serialization": True})
        assert not caplog.records
        save._check_arguments({"save_function": torch.save})
        assert "without save_function" in caplog.text


def test_several_files_have_names_that_no_reader_has_seen(tmp_path) -> None:
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for is_locked, exists, same in ((True, False, True), (False, False, False), (True, True, False)):
        if exists:
            (tmp_path / files[1]).touch()
        place: Any = SimpleNamespace(path=tmp_path, is_locked=is_locked)
        names = save._names(place, files)
        assert (names == {file: file for file in files}) == same
        assert save._names(place, files[1:]) == {files[1]: files[1]}
        assert len(set(names.values())) == 2
