"""A file in memory that the ranks of one machine map: counters, and two slots for the data of every rank.

Plain stores and loads order it, which suffices on x86-64 alone: other processors may show a counter before the data
that was stored ahead of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import struct
import sys
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")
"""Where the files lie until all ranks have mapped them."""

SLOT = 1 << 20
"""Bytes of a slot; longer tensors pass through it in pieces."""

WORDS = 16
"""Words of 8 bytes that each rank writes: two cache lines, which the processor fetches together."""
COUNT, KIND, LENGTH, TOKEN, AWAITS = 0, 1, 3, 5, 6
"""Places of a rank's words: the steps that it has made; for either slot the collective and a length; its token; the
number of the rank that it sleeps for, from 1 on, or 0."""

_FUTEX, _WAIT, _WAKE = 202, 0, 1
"""The system call of x86-64 that lets processes sleep until a word in their memory changes: futex(2)."""

_SYSCALL = ctypes.CDLL(None).syscall
_FLOCK = "hhqqi4x"
"""struct flock of fcntl(2): type, whence, start, length, process."""


class Segment:
    """The file, mapped; it is there as long as one rank maps it, also once it has no name."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        """Map the file for `rank` of `size`. Raises OSError or ValueError where it cannot be mapped."""
        self.rank, self.size = rank, size
        self._fence = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes(size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        head = size * WORDS * 8
        self.words = memoryview(memory)[:head].cast("q")
        """Those of all ranks, `WORDS` each."""
        self.bytes = memoryview(memory)[head:]
        """The slots: two of each rank, one after the other."""
        with torch.inference_mode(False):  # tensors that are made in it may not be written to outside
            self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
        # The kernel takes it away when the process has ended, however. It belongs to this opening of the file.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, rank))

    @classmethod
    def create(cls, size: int) -> tuple[Segment, Path]:
        """A segment for `size` ranks, seen by the first, and the name that others find it by.

        Raises OSError where its memory cannot be reserved: memory that is only promised would end a rank by SIGBUS.
        """
        path = FOLDER / f"tp_transformers-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes(size))
            return cls(path, 0, size), path
        except BaseException:
            path.unlink()
            raise

    def leave(self) -> None:
        """In a fork of the process, which does not count as the rank."""
        self._close()

    def offset(self, rank: int, turn: int) -> int:
        """Where slot `turn` (0 or 1) of `rank` begins, in `bytes` and `tensor`."""
        return (2 * rank + turn) * SLOT

    def slots(self, shape: torch.Size, dtype: torch.dtype) -> list[list[Tensor]]:
        """Tensors of a shape at the beginning of every rank's slots, for either turn."""
        length = shape.numel() * dtype.itemsize
        with torch.inference_mode(False):
            return [
                [self.tensor[self.offset(rank, turn) :][:length].view(dtype).view(shape) for rank in range(self.size)]
                for turn in (0, 1)
            ]

    def publish(self, count: int) -> None:
        """Count up to `count`, and wake the ranks that sleep until then."""
        self.words[self.rank * WORDS + COUNT] = count
        with self._fence:  # a locked instruction: others see the count before this rank looks who sleeps
            pass
        for rank in range(self.size):
            if self.words[rank * WORDS + AWAITS] == self.rank + 1:
                _futex(self._address + self.rank * WORDS * 8, _WAKE, 1 << 30, None)
                return

    def sleep(self, rank: int, count: int, seconds: float) -> None:
        """Sleep until `rank` has counted up to `count`, or about so many seconds, at most 1."""
        self.words[self.rank * WORDS + AWAITS] = rank + 1
        found, limit = self.words[rank * WORDS + COUNT], struct.pack("qq", 0, int(seconds * 1e9))
        if found < count:
            _futex(self._address + rank * WORDS * 8, _WAIT, found & 0xFFFFFFFF, limit)
        self.words[self.rank * WORDS + AWAITS] = 0

    def has_ended(self, rank: int) -> bool:
        """True if the process of another `rank` has ended, or holds the segment no more."""
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, rank))
        return int(struct.unpack(_FLOCK, found)[0]) == fcntl.F_UNLCK


def _futex(address: int, operation: int, value: int, limit: bytes | None) -> None:
    _SYSCALL(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        ctypes.c_char_p(limit),
        None,
        0,
    )


def _lock(kind: int, rank: int) -> bytes:
    """Of the byte that stands for a rank, as fcntl(2) takes it."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, rank, 1, 0)


def nbytes(size: int) -> int:
    """Bytes of a segment of `size` ranks."""
    return size * (WORDS * 8 + 2 * SLOT)


def is_supported() -> bool:
    """True on Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and FOLDER.is_dir()
