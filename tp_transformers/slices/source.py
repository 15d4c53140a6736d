"""The interface of a file that bytes are read from; one class a storage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Lock

from ..errors import CheckpointError


class Source(AbstractContextManager["Source"]):
    """A file of known size that several threads may read from any offset. Use as a context manager, or `close()` it."""

    name: str
    """The file's name in error messages."""
    size: int
    """Length in bytes."""
    header_hash: str | None = None
    """Hash of the safetensors header, once that is read."""
    is_remote: bool = False
    """True if reads cross a network, so that ranks should share the bytes that they fetch."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes_read = 0
        """Bytes copied into memory so far."""
        self.reads = 0
        """Read calls issued so far, and copies from the memory map."""

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes_read += nbytes

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the consecutive bytes from `offset` on.

        Raises CheckpointError where the file ends before that or cannot be read.
        """

    def read_bytes(self, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length). Raises CheckpointError as `read` does."""
        buffer = bytearray(length)
        self.read(offset, [memoryview(buffer)])
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where the file is not the one that was opened, or was written to since."""

    def fault(self, got: str, expected: str, fix: str) -> CheckpointError:
        """The error to raise for something wrong with the file."""
        return CheckpointError(f"checkpoint file {self.name}", got=got, expected=expected, fix=fix)

    @abstractmethod
    def close(self) -> None:
        """Release the file; a second call does nothing."""

    def __exit__(self, *exception: object) -> None:
        self.close()
