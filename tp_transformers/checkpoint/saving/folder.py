"""A folder that a save writes to: one save at a time, and readers see the earlier checkpoint or the new one.

The files of a save are written to a hidden folder in it, which costs no copy to move out of. Until the file that names
the others is moved, the earlier checkpoint is what it was; the files of that one are removed afterwards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...errors import CheckpointError
from .writer import make_folder, named, sync_folder

_PREFIX = ".saving-"


class SaveFolder:
    """The folder of a save that is going on.

    Use as a context manager: what was not put in place is removed, and so is a folder that is new and has no files.

    A save that is killed leaves its hidden folder, which the next one removes.
    """

    staging: Path
    """The hidden folder, for files that `put` moves."""

    def __init__(self, path: Path) -> None:
        """Make the folder at `path`, unless it is there, and keep other saves out of it.

        Raises CheckpointError where it cannot be made or written to, or where another save is going on in it, on any
        node that the file system locks folders for.
        """
        self._is_new = not path.exists()
        make_folder(path)
        self.path = path
        with named(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with named(path):
                self.is_locked = self._lock()
                for left in path.glob(f"{_PREFIX}*") if self.is_locked else ():
                    shutil.rmtree(left, ignore_errors=True)
                self.staging = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=path))
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> bool:
        """True if other saves are kept out; False on file systems that lock no folders."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"folder {self.path}",
                got="another save that is going on in it",
                expected="one save at a time",
                fix="Wait for its end, or choose another folder.",
            ) from None
        except OSError:  # NFS, for one, locks no folders
            return False
        return True

    def put(self, names: Iterable[str]) -> None:
        """Move files out of `staging`, in place of others of the same names; their names are on the disk then."""
        for name in names:
            (self.staging / name).replace(self.path / name)
        sync_folder(self.path)

    def __enter__(self) -> SaveFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        os.close(self._descriptor)
        if self._is_new:
            with suppress(OSError):  # it has files
                self.path.rmdir()
