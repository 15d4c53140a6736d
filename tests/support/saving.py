"""Saves that are killed, or meet an error of the system, at any one of their file operations; and what is left then."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.models import llama_config
from tests.support.needs import needs

MANIFEST_NAME = "model.safetensors.index.sharded.json"
"""The file that names the shards of a checkpoint; earlier releases wrote it too."""

_CHANGES = {
    "open",
    "os.rename",
    "os.link",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "shutil.copyfile",
}
"""Audit events of what changes files."""

_FALLIBLE = _CHANGES - {"shutil.rmtree"} | {"os.scandir", "os.listdir"}
"""Audit events of single operations of the system, which may fail."""


@dataclass
class Saved:
    """A tensor-parallel model of one rank, and the ordinary checkpoint that it was loaded from."""

    model: Any
    folder: Path

    @property
    def mark(self) -> int:
        """An entry of the config, by which it is known whose a config is."""
        return int(self.model.config.max_position_embeddings)


def made(folder: Path, seed: int) -> Saved:
    """A tiny Llama, whose weights and config are those of this seed alone."""
    torch.manual_seed(seed)
    LlamaForCausalLM(llama_config(4, 2, max_position_embeddings=64 + seed)).save_pretrained(folder)
    with tp_transformers.enable():
        return Saved(AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto"), folder)


def _trainer(saved: Saved, folder: Path) -> None:
    from transformers import TrainingArguments

    from tp_transformers.trainer import Trainer

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True)
    Trainer(model=saved.model, args=arguments).save_model(str(folder))


def _shard(saved: Saved, folder: Path, size: int) -> None:
    from tp_transformers.features.presharded.offline import shard_checkpoint

    shard_checkpoint(str(saved.folder), folder, size=size)


KINDS: dict[str, Callable[[Saved, Path], object]] = {
    "one file": lambda saved, folder: saved.model.save_pretrained(folder),
    "nine files": lambda saved, folder: saved.model.save_pretrained(folder, max_shard_size="20KB"),
    "some files": lambda saved, folder: saved.model.save_pretrained(folder, max_shard_size="60KB"),
    "trainer": _trainer,
    "a file a rank": lambda saved, folder: tp_transformers.save_sharded(saved.model, folder),
    "shard, 2": lambda saved, folder: _shard(saved, folder, 2),
    "shard, 3": lambda saved, folder: _shard(saved, folder, 3),
}
"""Kinds of saves; those of one family may follow each other in a folder."""

ORDINARY = ("one file", "nine files", "some files", "trainer")
SHARDED = ("a file a rank", "shard, 2", "shard, 3")


def saves(cases: Iterable[str | tuple[str, str | None]]) -> list[Any]:
    """Cases of kinds of saves, or of a kind and the kind of an earlier save."""
    found = []
    for case in cases:
        kinds = (case,) if isinstance(case, str) else case
        found.append(pytest.param(*kinds, marks=[needs("presharded")] if set(kinds) & {*SHARDED} else []))
    return found


Loaded = tuple[dict[str, torch.Tensor], int]

_LOADED: dict[bytes, Loaded | None] = {}
"""What loads found, by the content of the folder."""


def loaded(folder: Path) -> Loaded | None:
    """Weights and the mark of the config that a load finds; None where there is nothing to load.

    Folders of the same files are loaded once. Folders in them, which no load looks at, do not count.
    """
    content = _content(folder)
    if content not in _LOADED:
        if len(_LOADED) > 50:
            _LOADED.clear()
        _LOADED[content] = _load(folder)
    return _LOADED[content]


def _content(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        elif not path.is_dir():
            digest.update(f"{path.name} leads nowhere ".encode())
    return digest.digest()


def _load(folder: Path) -> Loaded | None:
    try:
        with tp_transformers.enable():
            model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    except (OSError, ValueError):  # no config, or no weights; a CheckpointError is an OSError
        return None
    return dict(model.state_dict()), model.config.max_position_embeddings


def weights_are(folder: Path, saved: Saved | None) -> bool:
    """True if a load finds the weights of `saved`; None for nothing to load."""
    found = loaded(folder)
    if found is None or saved is None:
        return found is None and saved is None
    expected = saved.model.state_dict()
    return found[0].keys() == expected.keys() and all(
        torch.equal(found[0][name], value) for name, value in expected.items()
    )


def config_is(folder: Path, saved: Saved) -> bool:
    found = loaded(folder)
    return found is not None and found[1] == saved.mark


def leftovers(folder: Path) -> list[str]:
    """Files and folders that no finished save leaves."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(name for name in names if "saving" in name or "partial" in name)


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


def killed(run: Callable[[], object], folder: Path, operation: int) -> bool:
    """Kill `run` before a change to files in `folder`, counted from 0; False where it ends before that."""

    def run_until() -> None:
        left = operation

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if not _changes(event, arguments, folder):
                return
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        sys.addaudithook(watch)
        with _same_names():
            run()

    status = in_child(run_until)
    assert status in (0, signal.SIGKILL)
    return status != 0


def _same_names() -> Any:
    """The part of names that is random is the same in every save, so that many of them leave the same files."""
    return mock.patch.object(secrets, "token_hex", lambda size: "5a" * size)


def _changes(event: str, arguments: tuple[Any, ...], folder: Path) -> bool:
    if event not in _CHANGES or not str(arguments[0]).startswith(str(folder)):
        return False
    return event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


class Faults:
    """An error of the system at one operation on files in a folder, counted from 0, or at all from it on."""

    def __init__(self, folder: Path, error: int, at: int, *, lasts: bool = False) -> None:
        self.folder, self.error, self.at, self.lasts = folder, error, at, lasts
        self.count = 0
        self.met: str | None = None
        """The operation that failed first."""

    def meet(self, operation: str, path: object) -> None:
        if not str(path).startswith(str(self.folder)):
            return
        self.count += 1
        if self.count - 1 == self.at or (self.lasts and self.count > self.at):
            self.met = self.met or f"{operation} {path}"
            raise OSError(self.error, os.strerror(self.error), str(path))


_FAULTS: list[Faults] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _FAULTS and event in _FALLIBLE:
        _FAULTS[-1].meet(event, arguments[0])


@contextmanager
def faults(folder: Path, error: int, at: int, *, lasts: bool = False) -> Iterator[Faults]:
    """Within the block, operations on files in `folder` fail; also fsync, which Python does not audit."""
    if not hasattr(sys, "_tp_transformers_watched"):
        sys.addaudithook(_watch)  # for the life of the process
        sys._tp_transformers_watched = True  # type: ignore[attr-defined]
    found, fsync = Faults(folder, error, at, lasts=lasts), os.fsync

    def synced(descriptor: int) -> None:
        found.meet("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    _FAULTS.append(found)
    try:
        with mock.patch.object(os, "fsync", synced), _same_names():
            yield found
    finally:
        _FAULTS.pop()
