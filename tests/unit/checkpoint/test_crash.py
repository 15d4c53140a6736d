"""Saves that are killed before any one of their file operations, and saves beside each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.models import llama_config
from tp_transformers import CheckpointError
from tp_transformers.checkpoint.saving.folder import SaveFolder

OPERATIONS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "shutil.copyfile",
}
"""Audit events of what changes files."""


def in_child(run: Callable[[], None]) -> int:
    """Run in a fork; returns its wait status: 0 for an end without an error, a signal's number, or 256 and more."""
    child = os.fork()
    if not child:
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed(run: Callable[[], None], folder: Path, operation: int) -> bool:
    """Kill `run` before an operation on files in `folder`, counted from 0; False where it ends before that."""

    def run_until() -> None:
        left = operation

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event not in OPERATIONS or not str(arguments[0]).startswith(str(folder)):
                return
            if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        sys.addaudithook(watch)
        run()

    status = in_child(run_until)
    assert status in (0, signal.SIGKILL)
    return status != 0


def values(folder: Path, **options: Any) -> dict[str, torch.Tensor] | None:
    """What a load finds; None where there is nothing to load."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError):  # no config, or no weights; a CheckpointError is an OSError
        return None
    return dict(model.state_dict())


def same(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor] | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two models of one architecture, as tensor-parallel ones of one rank."""
    made = []
    with tp_transformers.enable():
        for seed in (1, 2):
            torch.manual_seed(seed)
            folder = tmp_path_factory.mktemp("model")
            LlamaForCausalLM(llama_config(4, 2)).save_pretrained(folder)
            made.append(AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto"))
    return made


SPLITS = {"none": None, "one file": "1GB", "as many files": "20KB", "fewer files": "40KB"}


@pytest.mark.parametrize("size", ["20KB", "1GB"], ids=["to files", "to one file"])
@pytest.mark.parametrize("before", SPLITS)
def test_a_killed_save_leaves_the_old_model_or_the_new_one(models: Any, tmp_path: Path, before: str, size: str) -> None:
    old, new = models
    start = tmp_path / "start"
    start.mkdir()
    if SPLITS[before] is not None:
        old.save_pretrained(start, max_shard_size=SPLITS[before])
    expected = None if SPLITS[before] is None else old.state_dict()
    seen, operation = set(), 0
    while True:
        folder = Path(shutil.copytree(start, tmp_path / f"{operation}"))
        was_killed = killed(partial(new.save_pretrained, folder, max_shard_size=size), folder, operation)
        found = values(folder)
        is_new = same(found, new.state_dict())
        assert is_new or same(found, expected), operation
        seen.add(is_new)
        if not was_killed:
            break
        if operation % 7 == 0:  # what was left behind is no hindrance, and does not stay
            new.save_pretrained(folder, max_shard_size=size)
            assert same(values(folder), new.state_dict())
            assert not [path.name for path in folder.iterdir() if "saving" in path.name or "partial" in path.name]
        shutil.rmtree(folder)
        operation += 1
    assert operation > 10
    assert seen == {False, True}
    assert is_new
    new.save_pretrained(tmp_path / "plain", max_shard_size=size)
    assert len(list(folder.glob("*.safetensors"))) == len(list((tmp_path / "plain").glob("*.safetensors")))


@pytest.mark.parametrize("has_old", [False, True])
def test_a_killed_sharded_save(models: Any, tmp_path: Path, has_old: bool) -> None:
    old, new = models
    start = tmp_path / "start"
    start.mkdir()
    if has_old:
        tp_transformers.save_sharded(old, start)
    expected = old.state_dict() if has_old else None
    operation = 0
    while True:
        folder = Path(shutil.copytree(start, tmp_path / f"{operation}"))
        was_killed = killed(partial(tp_transformers.save_sharded, new, folder), folder, operation)
        with tp_transformers.enable():
            found = values(folder, tp_plan="auto")
        is_new = same(found, new.state_dict())
        assert is_new or same(found, expected), operation
        if not was_killed:
            break
        operation += 1
    assert operation > 8
    assert is_new
    assert len(list(folder.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_one_save_at_a_time(models: Any, tmp_path: Path, sharded: bool) -> None:
    old, new = models

    def save(model: Any) -> None:
        if sharded:
            tp_transformers.save_sharded(model, tmp_path)
        else:
            model.save_pretrained(tmp_path, max_shard_size="20KB")

    save(old)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with SaveFolder(tmp_path):
        assert in_child(lambda: save(new)) == 256
        with pytest.raises(CheckpointError, match="another save that is going on") as caught:
            save(new)
        assert str(caught.value).count("got") == 1, "one error, which is not wrapped in another"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    save(new)
    with tp_transformers.enable():
        assert same(values(tmp_path, **({"tp_plan": "auto"} if sharded else {})), new.state_dict())


def test_a_file_system_without_locks(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".saving-another").mkdir()
    models[0].save_pretrained(tmp_path)
    assert (tmp_path / ".saving-another").exists(), "another save may be going on"
    assert same(values(tmp_path), models[0].state_dict())


def test_links_are_replaced_and_not_written_through(models: Any, tmp_path: Path) -> None:
    blob, folder = tmp_path / "blob", tmp_path / "folder"
    folder.mkdir()
    blob.write_text("another's")
    for name in ("model.safetensors", "config.json"):
        (folder / name).symlink_to(blob)
    models[0].save_pretrained(folder)
    assert blob.read_text() == "another's"
    assert same(values(folder), models[0].state_dict())
