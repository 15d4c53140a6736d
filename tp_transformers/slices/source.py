"""The interface of a file to read bytes from; each storage implements it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

from ..errors import CheckpointError


class Source(AbstractContextManager["Source"]):
    """A file of known size; several threads may read at any offset. Use as a context manager, or `close()` it."""

    name: str
    """The file's name in error messages."""
    size: int
    """Length in bytes."""
    header_hash: str | None = None
    """Hash of the file's header, once read."""
    metadata: Mapping[str, Any] = {}
    """Metadata of the file, once read."""
    etag: str | None = None
    """Name of the content on the Hub, if known."""
    is_remote: bool = False
    """True if reads cross a network, so that ranks should fetch each byte once and share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes_read = 0
        """Bytes copied into memory so far."""
        self.reads = 0
        """Read calls and copies from the memory map so far."""

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes_read += nbytes

    @property
    def address(self) -> str:
        """The path or the URL of the file."""
        return self.name

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` in order with the consecutive bytes from `offset` on.

        Raises CheckpointError if the file ends too early or cannot be read.
        """

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read the bytes [offset, offset + length). Raises CheckpointError as `read` does."""
        buffer = bytearray(length)
        self.read(offset, [memoryview(buffer)])
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was replaced or written to since it was opened."""

    def fault(self, got: str, expected: str, fix: str) -> CheckpointError:
        """The error to raise for a fault of the file."""
        return CheckpointError(f"checkpoint file {self.name}", got=got, expected=expected, fix=fix)

    @abstractmethod
    def close(self) -> None:
        """Release the file; a second call does nothing."""

    def __exit__(self, *exception: object) -> None:
        self.close()
