"""A folder that a save writes to: one save at a time, and readers see the earlier checkpoint or the new one.

Saves on all copies of a model fail together (`on_all_copies`).

A save writes its files to a hidden folder inside the target, so moving them needs no copy. Until the file that names
the others is moved, the earlier checkpoint is unchanged; its files are removed afterwards.

A folder that is a symbolic link is resolved. Links inside the folder are replaced, not written through.

Limits: no file system moves two files at once, so `config.json` and the file that makes the folder the new checkpoint
are moved directly one after the other. A kill between the two leaves the new config beside the old weights. That is
harmless if both saves have the same config; if not, a load fails on shapes or computes with wrong constants until the
next save. An error between the two restores the old config. A load that runs while a save ends may read the old config
and the new weights.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ...errors import CheckpointError
from ...logs import get_logger
from ...ranks.group import TP_AXIS, TensorParallelGroup, agreed, reported
from ...seams import features
from .writer import STAGING, make_folder, named, sync_file, sync_folder

_TRIES = 10
"""Attempts to create the folder while a failing save removes it."""

logger = get_logger(__name__)


class SaveFolder(AbstractContextManager["SaveFolder"]):
    """The folder of a running save.

    Use as a context manager: on exit it removes files that were not moved into place, and the folder if it is new and
    empty. A save that is killed leaves its hidden folder, which the next save removes.
    """

    staging: Path
    """The hidden folder, with the files for `put` to move."""

    is_complete = False
    """True once the folder is the new checkpoint."""

    _descriptor = -1
    _is_new = False

    def __init__(self, path: Path) -> None:
        """Create the folder at `path` if it is missing, and lock it against other saves.

        Raises CheckpointError if it cannot be created or written to, or if another save holds the lock (on any node, if
        the file system supports locks).
        """
        self.path = path
        try:
            self.is_locked = self._enter()
        except BaseException:
            self.__exit__()
            raise

    def _enter(self) -> bool:
        """Open the folder, and make the hidden folder, with which no failing save removes it; True if it is locked."""
        for _ in range(_TRIES):
            with named(self.path, "folder"):
                self._is_new = not self.path.exists()
            make_folder(self.path)
            with named(self.path, "folder"), suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                is_locked = self._lock()
                for stale in self.path.glob(f"{STAGING}*") if is_locked else ():
                    shutil.rmtree(stale, ignore_errors=True)
                self.staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.path))
                if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                    return is_locked
                shutil.rmtree(self.staging, ignore_errors=True)
            self._close()
        got = "a folder that is removed again and again"
        fix = "Wait for other saves into it to end, or choose another folder."
        raise CheckpointError(f"folder {self.path}", got=got, expected="one that stays", fix=fix)

    def _lock(self) -> bool:
        """Lock the folder; return False on file systems that cannot lock folders."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_new = False  # the other save owns the folder
            got, fix = "another save that is going on in it", "Wait for its end, or choose another folder."
            raise CheckpointError(f"folder {self.path}", got=got, expected="one save at a time", fix=fix) from None
        except OSError:  # for example NFS cannot lock folders
            return False
        return True

    def put(self, names: Sequence[str], *, instead_of: str | None = None) -> None:
        """Move files out of `staging`, replacing files of the same names, and remove the file `instead_of`.

        The last step (this removal, else the last move) makes the folder the new checkpoint. All files are synced to
        disk first, and the directory entries of all but the last two steps; the config should be the second to last.
        Raises CheckpointError on an error; before the last step, the other steps are undone.
        """
        for name in names:
            with named(self.staging / name):
                sync_file(self.staging / name)
        steps = [*names] if instead_of is None else [*names, instead_of]
        kept = {name: self._keep(name) for name in steps[:-1]}
        done: list[str] = []
        try:
            for name in steps:
                if len(steps) - len(done) == 2:
                    sync_folder(self.path)
                with named(self.path / name):
                    if name == instead_of:
                        (self.path / name).unlink(missing_ok=True)
                    else:
                        (self.staging / name).replace(self.path / name)
                done.append(name)
        except BaseException:
            for name in reversed(done):
                self._undo(name, kept[name])
            raise
        self.is_complete = True
        sync_folder(self.path)

    def _keep(self, name: str) -> Path | None:
        """Copy a file (no weights) of an earlier checkpoint, to undo a move; None if there is no such file."""
        path, copy = self.path / name, self.staging / f".kept-{name}"
        with named(path):
            if not os.path.lexists(path):
                return None
            shutil.copy2(path, copy, follow_symlinks=False)
        return copy

    def _undo(self, name: str, kept: Path | None) -> None:
        with suppress(OSError):  # another error is being raised
            if kept is None:
                (self.path / name).unlink()
            else:
                kept.replace(self.path / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that readers no longer use; log those that cannot be removed."""
        for name in names:
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s is of an earlier save, and could not be removed: %s", self.path / name, error)

    def __exit__(self, *exception: object) -> None:
        try:
            if hasattr(self, "staging"):
                shutil.rmtree(self.staging, ignore_errors=True)
            if self._is_new:
                with suppress(OSError):  # not empty
                    self.path.rmdir()
        finally:
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):  # see `_lock`. Unlock explicitly: a forked process may share the descriptor.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


T = TypeVar("T")


def on_all_copies(group: TensorParallelGroup, file: Path, save: Callable[[], object], *, writes: bool) -> None:
    """Run `save` on all copies, and return on all ranks when `file` is written.

    Collective over all axes of the mesh. `writes`: True on a rank that has written `file`. Raises the error of a copy
    on every rank; the ranks of that copy agree on one inside `save`.
    """
    failure: Exception | None = None
    try:
        save()
    except Exception as error:
        failure = error
    report = next(filter(None, of_copies(group, reported(failure))), None)
    if failure is not None:
        raise failure
    if report is not None:
        kind, text = report
        raise agreed(kind(text))
    for feature in features().values():
        feature.after_save(group, file, writes=writes)


def of_copies(group: TensorParallelGroup, value: T) -> list[T]:
    """Gather the `value` of the ranks of all copies that hold the same shards as this rank."""
    values = [value]
    for axis in (group.mesh.mesh_dim_names or ()) if group.mesh is not None else ():  # in turn: no further group
        if axis != TP_AXIS and group.mesh is not None:
            mesh = DeviceMesh.from_group(group.mesh.get_group(axis), group.device.type)
            gathered = TensorParallelGroup.of_mesh(mesh, group.device).gather(values)
            values = [each for several in gathered for each in several]
    return values
