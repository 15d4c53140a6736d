"""Saves that are killed before any one of their file operations, and saves beside each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

import tp_transformers
from tests.support.needs import needs
from tests.support.saving import (
    KINDS,
    ORDINARY,
    SHARDED,
    config_is,
    in_child,
    killed,
    leftovers,
    saves,
    weights_are,
)
from tests.support.tiers import wide
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.saving.folder import SaveFolder

QUICK = [("some files", "one file"), ("a file a rank", "a file a rank")]
ALL = [(kind, before) for family in (ORDINARY, SHARDED) for kind in family for before in (None, *family)]
"""Kind of a save, and that of the earlier one in the folder."""


@pytest.mark.parametrize(("kind", "before"), wide(saves(dict.fromkeys([*QUICK, *ALL])), quick=len(QUICK)))
def test_a_killed_save_leaves_the_old_model_or_the_new_one(models, tmp_path, kind, before) -> None:
    old, new, _ = models
    start = tmp_path / "start"
    start.mkdir()
    if before is not None:
        KINDS[before](old, start)
    seen, mixed, operation = set(), [], 0
    while True:
        folder = Path(shutil.copytree(start, tmp_path / f"{operation}"))
        was_killed = killed(partial(KINDS[kind], new, folder), folder, operation)
        is_new = weights_are(folder, new)
        assert is_new or weights_are(folder, None if before is None else old), operation
        if (is_new or before is not None) and not config_is(folder, new if is_new else old):
            mixed.append(operation)
        seen.add(is_new)
        if not was_killed:
            break
        if operation % 7 == 0:  # what was left behind is no hindrance, and does not stay
            KINDS[kind](new, folder)
            assert weights_are(folder, new)
            assert not leftovers(folder)
        shutil.rmtree(folder)
        operation += 1
    assert operation > 8
    assert seen == {False, True}
    assert is_new
    assert len(mixed) <= (before is not None), "the config is moved directly before the weights count"
    KINDS[kind](new, tmp_path / "plain")
    assert len(list(folder.glob("*.safetensors"))) == len(list((tmp_path / "plain").glob("*.safetensors")))


@pytest.mark.parametrize("kind", saves(["some files", "a file a rank"]))
def test_one_save_at_a_time(models, tmp_path, kind) -> None:
    old, new, _ = models
    KINDS[kind](old, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with SaveFolder(tmp_path):
        assert in_child(lambda: KINDS[kind](new, tmp_path)) == 256
        with pytest.raises(CheckpointError, match="another save that is going on") as caught:
            KINDS[kind](new, tmp_path)
        assert str(caught.value).count("got") == 1, "one error, which is not wrapped in another"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    KINDS[kind](new, tmp_path)
    assert weights_are(tmp_path, new)


def test_a_process_that_is_forked_during_a_save_keeps_no_lock(tmp_path) -> None:
    with SaveFolder(tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with SaveFolder(tmp_path) as place:
            assert place.is_locked
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_cannot_be_removed_of_an_earlier_save_stays(tmp_path) -> None:
    stale = tmp_path / ".saving-earlier"
    stale.write_text("no folder")
    with SaveFolder(tmp_path) as place:
        assert place.staging.is_dir()
    assert stale.exists()


@pytest.mark.parametrize("error", [None, OSError(95, "Operation not supported")])
def test_a_folder_that_a_failed_save_removes_meanwhile(tmp_path, monkeypatch, error) -> None:
    """It is made again; a lock on one that has gone keeps nobody out."""
    folder, flock = tmp_path / "folder", fcntl.flock
    removed = []

    def removing(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(folder.rmdir())
        if error is not None:
            raise error
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removing)
    with SaveFolder(folder) as place:
        assert place.is_locked == (error is None)
        assert place.staging.parent.samefile(folder)
    assert not folder.exists()


def test_a_file_system_without_locks(models, tmp_path, monkeypatch) -> None:
    """Another save may be going on: nothing of it is removed, and no name is one of its own."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".saving-another").mkdir()
    another = [f"model-0000{piece}-of-00002.safetensors" for piece in (1, 2)]
    for name in another:
        (tmp_path / name).write_text("another's")
    for saved in models[:2]:
        KINDS["some files"](saved, tmp_path)
        assert weights_are(tmp_path, saved)
    assert (tmp_path / ".saving-another").exists()
    assert [(tmp_path / name).read_text() for name in another] == ["another's"] * 2
    assert len(list(tmp_path.glob("model-*-00001-of-00003.safetensors"))) == 1, "those of the first save are removed"


@needs("presharded")
def test_two_forms_of_a_checkpoint_are_not_mixed(models, tmp_path) -> None:
    old, new, _ = models
    KINDS["a file a rank"](old, tmp_path)
    with pytest.raises(CheckpointError, match=r"a folder that holds model\.safetensors\.index\.sharded\.json"):
        KINDS["one file"](new, tmp_path)
    assert weights_are(tmp_path, old)
    with pytest.raises(tp_transformers.UnsupportedError, match="variant='sharded'"):
        new.model.save_pretrained(tmp_path / "variant", variant="sharded")
    assert not (tmp_path / "variant").exists()
