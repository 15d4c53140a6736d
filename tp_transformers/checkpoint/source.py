"""Where bytes come from: one small interface, one class a storage."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

from ..errors import CheckpointError, describe

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)


class Source(ABC):
    """A file of known size that can be read from any offset. Use as a context manager, or `close()` it."""

    name: str
    """What error messages call it."""
    size: int
    """Length in bytes."""
    bytes_read: int = 0
    """Bytes read so far."""
    reads: int = 0
    """Read calls issued so far."""
    is_remote: bool = False
    """Whether reading crosses a network, so that ranks should share what they fetch."""

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the consecutive bytes from `offset` on.

        Raises CheckpointError where the file ends before, or cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file; a second call does nothing."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalFile(Source):
    """A file on a mounted file system, read with `preadv` straight into the buffers.

    `preadv` rather than a memory map: a map's page faults cost several times the copy itself, and land in the first
    forward instead of in the load.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`. Raises CheckpointError where there is no such file or it cannot be opened."""
        self.name = os.fspath(path)
        self._fd = -1
        try:
            self._fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointError(
                describe(
                    f"checkpoint file {self.name}",
                    got="no such file",
                    expected="a safetensors file",
                    fix="Download the checkpoint again, or correct its index.",
                )
            ) from None
        except OSError as error:
            raise CheckpointError(f"checkpoint file {self.name} cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; interrupted and partial reads are continued."""
        pending = [buffer for buffer in buffers if len(buffer)]
        position = offset
        while pending:
            try:
                count = os.preadv(self._fd, pending[:_IOV_MAX], position)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint file {self.name}: reading at byte {position} failed: {error.strerror}"
                ) from error
            if count == 0:
                missing = sum(map(len, pending))
                raise CheckpointError(
                    describe(
                        f"checkpoint file {self.name}",
                        got=f"the end of the file at byte {position}",
                        expected=f"{missing} bytes more",
                        fix="The file is truncated, or changed while it was read; download it again.",
                    )
                )
            self.reads += 1
            self.bytes_read += count
            position += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]

    def close(self) -> None:
        """Close the file descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()
