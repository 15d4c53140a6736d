"""Files on a mounted file system: reads into buffers, and memory maps."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...slices.stored import Source

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, without which a map of more than all memory is refused; Python has the name from 3.13 on."""

_SAMPLE_BYTES = 1 << 20
"""Distance between the bytes that `is_resident` probes."""


class LocalFile(Source):
    """A file on a mounted file system, read with `preadv` straight into the buffers.

    Contiguous reads use `preadv` rather than a memory map: page faults of a map cost several times the copy, and would
    happen in the first forward instead of the load.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`. Raises CheckpointError if the file is missing or cannot be opened."""
        super().__init__()
        self.name = os.fspath(path)
        self.fd = -1
        try:
            self.fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            fix = "Download the checkpoint again, or correct its index."
            raise self.fault("no such file", "a safetensors file", fix) from None
        except OSError as error:
            raise CheckpointError(f"checkpoint file {self.name} cannot be opened: {error.strerror}") from error
        self.identity = _identity(os.fstat(self.fd))
        """Device, inode, size and modification time, which identify a version of a file on one machine."""
        self.size = self.identity[2]

    def read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `Source.read`; continues interrupted and partial reads."""
        pending = [buffer for buffer in buffers if len(buffer)]
        position = offset
        while pending:
            count = self.preadv(pending[:_IOV_MAX], position)
            if count == 0:
                got, expected = f"the end of the file at byte {position}", f"{sum(map(len, pending))} bytes more"
                fix = "The file is truncated, or changed while it was read; download it again."
                raise self.fault(got, expected, fix)
            self.count(count)
            position += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]

    @cached_property
    def _map(self) -> mmap.mmap | None:
        """A copy-on-write memory map; None if the file system has no maps, or the file was truncated."""
        try:
            return mmap.mmap(
                self.fd, self.size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError):
            return None

    @property
    def has_map(self) -> bool:
        """True if the file can be mapped into memory."""
        return self._map is not None

    def pages(self, offset: int, nbytes: int) -> torch.Tensor:
        """The `nbytes` from `offset` on in a memory map, as a uint8 tensor whose storage is exactly these bytes.

        Strided copies out of it need no buffer and no system call per row. Pages are copied when they are written to;
        the tensor outlives `close`. `has_map` has to be true.
        """
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)

    def is_resident(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Return True if the probed bytes, one in every MiB of `spans` (start, stop), are in the page cache.

        A file system that cannot answer counts as not cached, unless it is an in-memory one.
        """
        if self._is_in_memory:
            return True
        probe = [memoryview(bytearray(1))]
        try:
            for start, stop in spans:
                for offset in (*range(start, stop, _SAMPLE_BYTES), stop - 1):
                    try:
                        os.preadv(self.fd, probe, offset, os.RWF_NOWAIT)
                    except BlockingIOError:  # not cached, or locked by another process: the second attempt decides
                        os.preadv(self.fd, probe, offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # AttributeError: not Linux
            return False
        return True

    @cached_property
    def _is_in_memory(self) -> bool:
        """True for a file system in memory (tmpfs, ramfs), which cannot report resident pages."""
        device = os.fstat(self.fd).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        # 36 35 98:0 /root /mount options ... - type source options: https://docs.kernel.org/filesystems/proc.html
        types = {fields[fields.index("-") + 1] for fields in map(str.split, mounts) if fields[2] == number}
        return bool(types & {"tmpfs", "ramfs"})

    def check_unchanged(self) -> None:
        """See `Source.check_unchanged`; compares inode, size and modification time."""
        try:
            now = _identity(os.fstat(self.fd))
            same = now == self.identity and _identity(os.stat(self.name)) == now
        except OSError:
            same = False
        if not same:
            raise self.fault(
                "another file, or other contents, after loading than before",
                "files that stay as they are while they are read",
                "Wait until the checkpoint is complete, then load it again.",
            )

    def close(self) -> None:
        """Close the file descriptor and drop the map, which lives as long as parameters view it."""
        vars(self).pop("_map", None)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on as far as one call does, uncounted; returns the number of bytes."""
        try:
            return os.preadv(self.fd, buffers, offset)
        except OSError as error:
            text = f"checkpoint file {self.name}: reading at byte {offset} failed: {error.strerror}"
            raise CheckpointError(text) from error

    def __del__(self) -> None:
        self.close()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
