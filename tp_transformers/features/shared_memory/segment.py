"""A shared memory file that the ranks of one machine map: counters, and two data slots per rank.

It relies on the store order of x86-64: on other processors a counter may become visible before data that was stored
earlier.
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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path("/dev/shm")
"""Folder of the files, until all ranks have mapped them."""

SLOT = 1 << 20
"""Bytes of a slot; longer tensors pass through it in chunks."""

WORDS = 16
"""Number of 8-byte words of each rank: two cache lines, which the processor fetches together."""
COUNT, KIND, LENGTH, TOKEN, AWAITS = 0, 1, 3, 5, 6
"""Indices of a rank's words: its step counter; the collective and a length, one each per slot; its token; the rank that
it sleeps for plus 1, or 0."""

_FUTEX, _WAIT, _WAKE = 202, 0, 1
"""futex(2) on x86-64: number of the system call, and its operations."""

_SYSCALL = ctypes.CDLL(None).syscall
_FLOCK = "hhqqi4x"
"""struct flock of fcntl(2): type, whence, start, length, process."""


class Segment:
    """The mapped file; it exists as long as a rank maps it, also after it was unlinked."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        """Map the file for `rank` of `size`. Raises OSError or ValueError if that fails."""
        self.rank, self.size = rank, size
        self._fence = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes(size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        head = size * WORDS * 8
        self.words = memoryview(memory)[:head].cast("q")
        """The words of all ranks, `WORDS` each."""
        self.bytes = memoryview(memory)[head:]
        """The slots of all ranks, two each."""
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
            self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
        # The kernel releases the lock when the process ends in any way. The lock belongs to this file description.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(rank))

    @classmethod
    def create(cls, size: int) -> tuple[Segment, Path]:
        """Create a segment for `size` ranks; returns it as rank 0, and its path for the other ranks.

        Raises OSError if its memory cannot be reserved. Writing to unreserved memory could end a rank by SIGBUS.
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
        """Close the file in a fork of the process, which is not the rank."""
        self._close()

    def offset(self, rank: int, turn: int) -> int:
        """Offset of slot `turn` (0 or 1) of `rank` in `bytes` and `tensor`."""
        return (2 * rank + turn) * SLOT

    def slots(self, shape: torch.Size, dtype: torch.dtype) -> list[list[Tensor]]:
        """Views of the given shape and dtype at the start of the slots: a list of all ranks for each turn."""
        length = shape.numel() * dtype.itemsize
        with torch.inference_mode(False):
            return [
                [self.tensor[self.offset(rank, turn) :][:length].view(dtype).view(shape) for rank in range(self.size)]
                for turn in (0, 1)
            ]

    def publish(self, count: int) -> None:
        """Set this rank's counter to `count`, and wake ranks that sleep on it."""
        self.words[self.rank * WORDS + COUNT] = count
        with self._fence:  # a locked instruction: the count is visible before this rank reads which ranks sleep
            pass
        for rank in range(self.size):
            if self.words[rank * WORDS + AWAITS] == self.rank + 1:
                _futex(self._address + self.rank * WORDS * 8, _WAKE, 1 << 30, None)
                return

    def sleep(self, rank: int, count: int, seconds: float) -> None:
        """Sleep until the counter of `rank` reaches `count`, for about `seconds` (at most 1) at most."""
        self.words[self.rank * WORDS + AWAITS] = rank + 1
        current, limit = self.words[rank * WORDS + COUNT], struct.pack("qq", 0, int(seconds * 1e9))
        if current < count:
            _futex(self._address + rank * WORDS * 8, _WAIT, current & 0xFFFFFFFF, limit)
        self.words[self.rank * WORDS + AWAITS] = 0

    def has_ended(self, rank: int) -> bool:
        """True if the process of another `rank` has ended, or no longer holds the segment."""
        lock = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(rank))
        return int(struct.unpack(_FLOCK, lock)[0]) == fcntl.F_UNLCK


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


def _lock(rank: int) -> bytes:
    """struct flock for the byte of a rank."""
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)


def nbytes(size: int) -> int:
    """Bytes of a segment of `size` ranks."""
    return size * (WORDS * 8 + 2 * SLOT)


def is_supported() -> bool:
    """True on Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and FOLDER.is_dir()


_SHORT = (torch.float16, torch.bfloat16)


@cache
def check_dtype(dtype: torch.dtype, *, is_maximum: bool = False) -> None:
    """Raise torch's error for a dtype without a sum or maximum, before a rank begins the collective."""
    numbers = [torch.empty(1, dtype=dtype) for _ in range(3)]
    combine(numbers[:2], numbers[2], is_maximum=is_maximum)


def combine(slots: Sequence[Tensor], out: Tensor, *, is_maximum: bool = False) -> None:
    """Write the sum of the slots, in order, or their maximum to `out`, which is not one of them."""
    first, second, *rest = slots
    if is_maximum:
        torch.maximum(first, second, out=out)
        for slot in rest:
            torch.maximum(out, slot, out=out)
    elif out.dtype in _SHORT:
        total = first.float()
        for slot in (second, *rest):
            total += slot
        out.copy_(total)
    else:
        torch.add(first, second, out=out)
        for slot in rest:
            out += slot


def chunks(nbytes: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks of at most `nbytes`; longer tensors have to be contiguous and of one shape."""
    if tensors[0].nbytes <= nbytes:
        yield tensors
    else:
        yield from zip(*(tensor.view(-1).split(nbytes // tensor.itemsize) for tensor in tensors), strict=True)
