"""Where bytes come from: one small interface, one class a storage."""

from __future__ import annotations

import hashlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from types import TracebackType

from ...errors import CheckpointError, describe
from .file_map import FileMap

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)

_SAMPLE_BYTES = 1 << 20
"""Of how many bytes one is looked at to tell whether they are in the page cache."""

BLOCKS, BLOCK_BYTES = 16, 4 << 10
"""How many blocks of a file are hashed to tell it from others, and how long they are."""


class Source(ABC):
    """A file of known size that several threads may read from any offset. Use as a context manager, or `close()` it."""

    name: str
    """What error messages call it."""
    size: int
    """Length in bytes."""
    header_hash: str | None = None
    """The hash of its safetensors header, once that is read."""
    is_remote: bool = False
    """Whether reading crosses a network, so that ranks should share what they fetch."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes_read = 0
        """Bytes copied into memory so far."""
        self.reads = 0
        """Read calls issued so far, and copies from the memory map."""

    def count(self, nbytes: int) -> None:
        """Count one read of `nbytes`."""
        with self._lock:
            self.reads += 1
            self.bytes_read += nbytes

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the consecutive bytes from `offset` on.

        Raises CheckpointError where the file ends before, or cannot be read.
        """

    def check_unchanged(self) -> None:  # noqa: B027 - a source may see to it in every read
        """Raise CheckpointError where the file is not the one that was opened, or was written to since."""

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
        super().__init__()
        self.name = os.fspath(path)
        self._fd = -1
        self._map: FileMap | None = None
        self._own_map: FileMap | None = None
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
        self.bytes_sampled = 0
        """Bytes that `sample` has read, which count in no other place."""
        status = os.fstat(self._fd)
        self.copy = (node(), status.st_dev, *_identity(status))
        """The same for all processes that read this very file, and for no others."""
        self._identity = _identity(status)
        self.size = self._identity[1]

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; interrupted and partial reads are continued."""
        pending = [buffer for buffer in buffers if len(buffer)]
        position = offset
        while pending:
            try:
                count = os.preadv(self._fd, pending[:_IOV_MAX], position)
            except OSError as error:
                raise self._failed(position, error) from error
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
            self.count(count)
            position += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]

    def map(self) -> FileMap:
        """The file as a memory map, made at the first call; for bytes that are in the page cache."""
        if self._map is None:
            self._map = FileMap(self._fd, self.size)
        return self._map

    def own_map(self) -> FileMap:
        """The file as memory that parameters may live in: a page that is written to becomes the process' own."""
        if self._own_map is None:
            self._own_map = FileMap(self._fd, self.size, own=True)
        return self._own_map

    def is_resident(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether all of some bytes that are looked at, one in every MiB of `spans` (start, stop), are in memory.

        A file system that does not say counts as one whose bytes are not, unless it is one in memory.
        """
        if self._is_in_memory:
            return True
        probe = [memoryview(bytearray(1))]
        try:
            for start, stop in spans:
                for offset in (*range(start, stop, _SAMPLE_BYTES), stop - 1):
                    try:
                        os.preadv(self._fd, probe, offset, os.RWF_NOWAIT)
                    except BlockingIOError:  # not there, or a lock is held by somebody else
                        os.preadv(self._fd, probe, offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # AttributeError: not Linux
            return False
        return True

    @cached_property
    def _is_in_memory(self) -> bool:
        """Whether the file system has no storage but memory: tmpfs, which cannot tell what is resident."""
        device = os.fstat(self._fd).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        # 36 35 98:0 /root /mount options ... - type source options: https://docs.kernel.org/filesystems/proc.html
        types = {fields[fields.index("-") + 1] for fields in map(str.split, mounts) if fields[2] == number}
        return bool(types & {"tmpfs", "ramfs"})

    def prefetch(self, start: int, stop: int) -> None:
        """Read bytes that nobody keeps, so that they are in the page cache."""
        scratch = memoryview(bytearray(min(stop - start, _SAMPLE_BYTES)))
        for offset in range(start, stop, _SAMPLE_BYTES):
            try:
                os.preadv(self._fd, [scratch[: stop - offset]], offset)
            except OSError as error:
                raise self._failed(offset, error) from error

    def sample(self) -> str:
        """The hash of a few blocks, at offsets that the size alone tells; of a short file, of all of it."""
        digest = hashlib.blake2b(digest_size=16)
        block, room = memoryview(bytearray(BLOCK_BYTES)), max(self.size - BLOCK_BYTES, 0)
        count = min(BLOCKS, -(-self.size // BLOCK_BYTES))
        for offset in (room * index // max(count - 1, 1) for index in range(count)):
            try:
                length = os.preadv(self._fd, [block], offset)
            except OSError as error:
                raise self._failed(offset, error) from error
            digest.update(block[:length])
            self.bytes_sampled += length
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """See `Source.check_unchanged`; by inode, size and time of the last change."""
        try:
            now = _identity(os.fstat(self._fd))
            same = now == self._identity and _identity(os.stat(self.name)) == now
        except OSError:
            same = False
        if not same:
            raise CheckpointError(
                describe(
                    f"checkpoint file {self.name}",
                    got="another file, or other contents, after loading than before",
                    expected="files that stay as they are while they are read",
                    fix="Wait until the checkpoint is complete, then load it again.",
                )
            )

    def close(self) -> None:
        """Close the file descriptor, and let go of the maps; one that parameters live in stays as long as they do."""
        for each in (self._map, self._own_map):
            if each is not None:
                each.close()
        self._map = self._own_map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _failed(self, offset: int, error: OSError) -> CheckpointError:
        return CheckpointError(f"checkpoint file {self.name}: reading at byte {offset} failed: {error.strerror}")

    def __del__(self) -> None:
        self.close()


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """What tells a file, and a version of it, from another: inode, size and time of the last change."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@cache
def node() -> str:
    """What processes that share files and a page cache have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()
