"""An error of the system at any file operation of a save: one clear error, and the folder is what it was."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.support.saving import KINDS, config_is, faults, leftovers, saves, weights_are
from tests.support.tiers import wide
from tp_transformers import CheckpointError

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO]

OVER = [
    *(("some files", "one file"), ("a file a rank", "shard, 2")),
    *(("one file", None), ("one file", "one file"), ("one file", "some files"), ("some files", None)),
    *(("some files", "nine files"), ("nine files", "some files"), ("shard, 2", None), ("shard, 2", "shard, 3")),
]
"""Kind of a save, and that of the earlier one in the folder."""


def names(folder: Path) -> list[str] | None:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else None


def is_clear(message: str, folder: Path) -> bool:
    """True if a message names the file or the folder where it was to be, and what to do; or what cannot be read."""
    has_all = (": got " in message and message.endswith(".")) or "cannot be opened: " in message
    return str(folder) in message and ".saving" not in message and has_all


@pytest.mark.parametrize(("kind", "before"), wide(saves(OVER), quick=2))
def test_a_fault_leaves_the_old_checkpoint(models, tmp_path, kind, before) -> None:
    old, new, _ = models
    start, at, bad = tmp_path / "start", 0, []
    if before is not None:
        KINDS[before](old, start)
    while True:
        folder, error = tmp_path / f"{at}", ERRORS[at % len(ERRORS)]
        if before is not None:
            shutil.copytree(start, folder)
        raised = None
        with faults(folder, error, at) as fault:
            try:
                KINDS[kind](new, folder)
            except Exception as caught:
                raised = caught
        if fault.met is None:
            assert raised is None
            break
        wrong = []
        if raised is None:
            if not (weights_are(folder, new) and config_is(folder, new)):
                wrong.append("not saved, and no error")
        else:
            if not isinstance(raised, CheckpointError):
                wrong.append(f"{type(raised).__name__}")
            elif not is_clear(str(raised), folder):
                wrong.append(str(raised))
            if weights_are(folder, old if before is not None else None):
                if before is not None and not config_is(folder, old):
                    wrong.append("config of the new one")
                if names(folder) != (names(start) if before is not None else None):
                    wrong.append(f"files {names(folder)}")
            elif not (weights_are(folder, new) and config_is(folder, new)):
                wrong.append("neither the old nor the new one")
            if leftovers(folder):
                wrong.append(f"left {leftovers(folder)}")
        if wrong:
            bad.append(f"{at} {fault.met.replace(str(tmp_path), '')}: {'; '.join(wrong)}"[:230])
        if leftovers(folder):
            KINDS[kind](new, folder)
            assert not leftovers(folder)
        at += 1
    assert at > 20
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", saves(["one file", "some files", "a file a rank"]))
def test_all_is_on_the_disk_before_it_counts(models, tmp_path, monkeypatch, kind) -> None:
    """Each file before it gets its name, all names before the last, and that of a new folder."""
    synced: set[int] = set()
    moved: list[str] = []
    folder, fsync, replace = tmp_path / "folder", os.fsync, Path.replace

    def record(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        moved.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def move(self: Path, target: Path) -> Path:
        assert self.stat().st_ino in synced, self
        moved.append(str(target))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", move)
    KINDS[kind](models[1], folder)
    steps = [path.removeprefix(f"{tmp_path}/") for path in moved if "/." not in path and "partial" not in path]
    assert steps[0] == str(tmp_path)
    last = {
        "one file": "model.safetensors",
        "some files": "model.safetensors.index.json",
        "a file a rank": "model.safetensors.index.sharded.json",
    }[kind]
    assert steps[-4:] == ["folder", "folder/config.json", f"folder/{last}", "folder"]


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("kind", "before"), saves(OVER))
def test_a_disk_that_fails_from_there_on(models, tmp_path, kind, before, error) -> None:
    """Nothing can be undone then: the weights are the old or the new ones, and the next save removes what is left."""
    old, new, _ = models
    start, at = tmp_path / "start", 0
    if before is not None:
        KINDS[before](old, start)
    while True:
        folder = tmp_path / f"{at}"
        if before is not None:
            shutil.copytree(start, folder)
        with faults(folder, error, at, lasts=True) as fault:
            try:
                KINDS[kind](new, folder)
                raised = None
            except CheckpointError as caught:
                raised = caught
        if raised is not None:
            assert is_clear(str(raised), folder), f"{at} {fault.met}: {raised}"
        is_new = weights_are(folder, new)
        assert is_new or (raised is not None and weights_are(folder, None if before is None else old)), fault.met
        if fault.met is None:
            break
        if at % 5 == 0:
            KINDS[kind](new, folder)
            assert weights_are(folder, new)
            assert not leftovers(folder)
        shutil.rmtree(folder)
        at += 3
