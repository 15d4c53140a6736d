"""A folder that a save writes to: one save at a time, and readers see the earlier checkpoint or the new one.

The files of a save are written to a hidden folder in it, which costs no copy to move out of. Until the file that names
the others is moved, the earlier checkpoint is unchanged; the files of that one are removed afterwards.

A folder that is a symbolic link is the folder that it leads to. Links in it are replaced, and not written through.

What remains: `config.json` and the file that makes the folder the new checkpoint are moved one directly after the
other, since no file system moves two at once. A kill between the two leaves the new config beside the old weights,
which is no harm where a model is saved again with the same config. Where it differs, a load meets other shapes
or computes with other constants; the next save mends it. An error between the two puts the old config back. A load
reads the config first too: one that runs while a save ends may take the old config and the new weights.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ...errors import CheckpointError
from ...logs import get_logger
from .writer import STAGING, make_folder, named, sync_file, sync_folder

_TRIES = 10
"""How often a folder is made that another save, which failed, removes meanwhile."""

logger = get_logger(__name__)


class SaveFolder:
    """The folder of a save that is going on.

    Use as a context manager: files that were not put in place are removed, and so is a folder that is new and has no
    files.

    A save that is killed leaves its hidden folder, which the next one removes.
    """

    staging: Path
    """The hidden folder, for files that `put` moves."""

    is_complete = False
    """True once the folder is the new checkpoint."""

    _descriptor = -1
    _is_new = False

    def __init__(self, path: Path) -> None:
        """Make the folder at `path`, unless it is there, and keep other saves out of it.

        Raises CheckpointError where it cannot be made or written to, or where another save is going on in it, on any
        node that the file system locks folders for.
        """
        self.path = path
        try:
            self.is_locked = self._enter()
            with named(path, "folder"):
                for left in path.glob(f"{STAGING}*") if self.is_locked else ():
                    shutil.rmtree(left, ignore_errors=True)
                self.staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=path))
        except BaseException:
            self._leave()
            raise

    def _enter(self) -> bool:
        """Open the folder; True if other saves are kept out."""
        for _ in range(_TRIES):
            with named(self.path, "folder"):
                self._is_new = not self.path.exists()
            make_folder(self.path)
            with named(self.path, "folder"), suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                is_locked = self._lock()
                if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                    return is_locked
            self._close()
        raise CheckpointError(
            f"folder {self.path}",
            got="a folder that is removed again and again",
            expected="one that stays",
            fix="Wait for other saves into it to end, or choose another folder.",
        )

    def _lock(self) -> bool:
        """True if other saves are kept out; False on file systems that lock no folders."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._is_new = False  # that save's, to remove
            raise CheckpointError(
                f"folder {self.path}",
                got="another save that is going on in it",
                expected="one save at a time",
                fix="Wait for its end, or choose another folder.",
            ) from None
        except OSError:  # NFS, for one, locks no folders
            return False
        return True

    def put(self, names: Sequence[str], *, instead_of: str | None = None) -> None:
        """Move files out of `staging`, in place of others of the same names, and remove the file `instead_of`.

        The last step, which is this removal or else the last move, makes the folder the new checkpoint. All files and
        their names are on the disk before, but for the last two: the config should be the last but one step. An error
        before the last step undoes the others. Raises CheckpointError on any.
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
        """A copy of an earlier checkpoint's file, which is not one of weights; None where there is none."""
        path, copy = self.path / name, self.staging / f".kept-{name}"
        with named(path):
            if not os.path.lexists(path):
                return None
            shutil.copy2(path, copy, follow_symlinks=False)
        return copy

    def _undo(self, name: str, kept: Path | None) -> None:
        with suppress(OSError):  # there is an error already
            if kept is None:
                (self.path / name).unlink()
            else:
                kept.replace(self.path / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no reader looks at any more; a file that cannot be removed is logged, and stays."""
        for name in names:
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s is of an earlier save, and could not be removed: %s", self.path / name, error)

    def __enter__(self) -> SaveFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        try:
            if hasattr(self, "staging"):
                shutil.rmtree(self.staging, ignore_errors=True)
            if self._is_new:
                with suppress(OSError):  # it has files
                    self.path.rmdir()
        finally:
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):  # as for `_lock`. A process that was forked meanwhile has the descriptor too.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1
