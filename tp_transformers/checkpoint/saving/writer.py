"""Tensors -> a safetensors file, written as a stream: at most one tensor is in memory besides the model's own."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from ...errors import CheckpointError
from ...slices.stored import byte_view
from ..reading.header import DTYPE_NAMES

STAGING = ".saving-"
"""Prefix of the hidden folder that files are written to before they are moved into place."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def make_folder(folder: Path) -> None:
    """Create a folder if it is missing, and sync its directory entry to disk. Raises CheckpointError on failure."""
    try:
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, fix = (error.strerror or str(error)).lower(), _remedy(error)
        if isinstance(error, FileExistsError):
            got = "a symbolic link that leads nowhere" if folder.is_symlink() else "a file of that name"
            fix = "Choose another."
        raise CheckpointError(f"folder {folder}", got=got, expected="a folder, or room for one", fix=fix) from error
    for path in created:
        sync_folder(path.parent)


@contextmanager
def named(path: Path, kind: str = "file") -> Iterator[None]:
    """Convert an OSError, such as a full disk, to a CheckpointError with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        final = Path(*(part for part in path.parts if not part.startswith(STAGING)))
        got, fix = error.strerror or str(error), _remedy(error)
        raise CheckpointError(f"{kind} {final}", got=got, expected="that it can be written", fix=fix) from error


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "Make room, or choose another folder."
    if error.errno in _FORBIDDEN:
        return "Give this user the right to write there, or choose another folder."
    return "Choose another folder, or see in the system's log what is wrong with its disk."


def sync_file(path: Path, kind: int = os.O_NOFOLLOW) -> None:
    """Sync a file that another library has written; with `kind=os.O_DIRECTORY`, the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY | kind)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync the directory entries of a folder to disk. Raises CheckpointError on failure.

    A crash after a rename then leaves the old or the new file; without this, POSIX guarantees neither.
    """
    with named(path, "folder"):
        try:
            sync_file(path, os.O_DIRECTORY)
        except PermissionError:  # a folder may be writable but not readable
            pass
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without fsync of folders
                raise


class Writer:
    """A safetensors file: the header is written first, the tensors in any order.

    It gets its name once it is complete. Until then an earlier file of that name stays; parameters may be mapped to it.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write the header for `tensors`, using only their dtypes and shapes.

        Tensors follow each other without gaps, sorted by descending item size, then by name: every tensor is aligned to
        its item size.
        """
        self.path = path
        self.pending: dict[str, tuple[int, Tensor]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        position = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            end = position + tensor.numel() * tensor.dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            self.pending[name] = (position, tensor)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self.size = self._data_start + position
        self._partial = path.with_name(f"{path.name}.partial")
        with named(path):
            self._file: BinaryIO = self._partial.open("wb")
        try:
            with named(path):
                self._put(0, len(text).to_bytes(8, "little") + text)
                self._file.truncate(self.size)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, value: Tensor) -> None:
        position, expected = self.pending.pop(name)
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise RuntimeError(f"{name} became {value.dtype} {tuple(value.shape)}, not {tuple(expected.shape)}")
        with named(self.path):
            self._put(self._data_start + position, byte_view(value.contiguous().cpu()))

    def finish(self) -> None:
        """Sync, rename and close the complete file. Raises RuntimeError if a tensor was never written."""
        if self.pending:
            raise RuntimeError(f"{self.path}: never written: {', '.join(self.pending)}")
        with named(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._partial.replace(self.path)
        sync_folder(self.path.parent)
        self._file.close()

    def close(self) -> None:
        """Close the file; remove it if it is incomplete."""
        if not self._file.closed:
            with suppress(OSError):  # a full disk has no room for buffered bytes
                self._file.close()
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _put(self, position: int, data: bytes | memoryview) -> None:
        self._file.seek(position)
        self._file.write(data)
