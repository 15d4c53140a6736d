"""Tensors -> a safetensors file, in a stream: no more than one tensor is in memory beside those of the model."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from ...errors import CheckpointError
from ...slices.stored import byte_view
from ..reading.header import DTYPE_NAMES

STAGING = ".saving-"
"""How the name of a hidden folder begins that files are written to before they have their places."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def make_folder(folder: Path) -> None:
    """Make a folder to write to, unless it is there; its name is on the disk then.

    Raises CheckpointError where it cannot be made.
    """
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        got = "a symbolic link that leads nowhere" if folder.is_symlink() else "a file of that name"
        raise CheckpointError(
            f"folder {folder}", got=got, expected="a folder, or room for one", fix="Choose another."
        ) from error
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        raise CheckpointError(
            f"folder {folder}", got=got, expected="a folder, or room for one", fix=_remedy(error)
        ) from error
    for path in made:
        sync_folder(path.parent)


@contextmanager
def named(path: Path, kind: str = "file") -> Iterator[None]:
    """Raise CheckpointError, with the path, in place of errors of the system, such as a full disk."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        parts = [part for part in path.parts if not part.startswith(STAGING)]  # where it was to be
        got = error.strerror or str(error)
        raise CheckpointError(
            f"{kind} {Path(*parts)}", got=got, expected="that it can be written", fix=_remedy(error)
        ) from error


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "Make room, or choose another folder."
    if error.errno in _FORBIDDEN:
        return "Give this user the right to write there, or choose another folder."
    return "Choose another folder, or see in the system's log what is wrong with its disk."


def write_text(path: Path, text: str) -> None:
    """Write a text file in place of another one: it is whole and on the disk when it has its name."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with named(path):
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring the content of a file that another library has written to the disk."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Bring the names of the files in a folder to the disk. Raises CheckpointError where that fails.

    A crash after a rename leaves the file of before or the new one; without this, POSIX promises neither.
    """
    with named(path, "folder"):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:  # files may be written to a folder that may not be listed
            return
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know no fsync of a folder
                raise
        finally:
            os.close(folder)


class Writer:
    """A safetensors file that gets its header first, and its tensors in any order.

    It has its name when it is complete: until then an earlier file stays, which parameters may live in.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write the header for `tensors`; only dtypes and shapes count.

        They stand without gaps, the widest dtypes first, so that every tensor is aligned to its elements, then by name.
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
        """Close a complete file, which is on the disk then. Raises RuntimeError where a tensor was never written."""
        if self.pending:
            raise RuntimeError(f"{self.path}: never written: {', '.join(self.pending)}")
        with named(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._partial.replace(self.path)
        sync_folder(self.path.parent)
        self._file.close()

    def close(self) -> None:
        """Close the file, and remove it unless it is complete."""
        if not self._file.closed:
            with suppress(OSError):  # a full disk has no room for what is buffered
                self._file.close()
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _put(self, position: int, data: bytes | memoryview) -> None:
        self._file.seek(position)
        self._file.write(data)


class SummedWriter(Writer):
    """A safetensors file that is written from its first byte to its last, with a CRC-32 that is known at the end."""

    crc32 = 0
    """CRC-32 of all bytes so far, header included."""
    _end = 0

    def write_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Write all tensors in the order of the file; the bytes are on the disk when this returns."""
        for name in list(self.pending):
            self.write(name, tensors[name])
        self.finish()

    def _put(self, position: int, data: bytes | memoryview) -> None:
        if position != self._end:
            raise RuntimeError(f"{self.path}: written at byte {position} after byte {self._end}")
        super()._put(position, data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self._end = self._file.tell()
