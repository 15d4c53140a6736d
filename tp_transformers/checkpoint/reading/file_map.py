"""Files as memory maps, for bytes in the page cache: strided copies out of a map need no buffer and no call a row.

A map has one danger: a read beyond the end of a truncated file raises SIGBUS, which ends the process without a message.
`survive_truncation` turns that into an error: copies run in worker threads, and the main thread, in its handler of the
signal, maps zero pages over the file, so that the copy runs to its end and can be discarded. Python does not tell the
handler the address, so that it asks the file system which of the mapped files has changed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_MAP_FIXED = 0x10
_SIGACTION_BYTES = 512
"""Room for a `struct sigaction`, with some to spare."""
_SIGNALS = 100
"""Number of signals after which their cause is no map, and they may end the process."""
_UNEXPLAINED = 20
"""Number of signals in a row that no file explains, after one was found, and after which another one is to blame."""
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """A map of a complete file; `close` it to unmap it with the last tensor that views it."""

    def __init__(self, fd: int, size: int, *, own: bool = False) -> None:
        """Map the `size` bytes of the open file `fd`; with `own`, copy-on-write instead of read-only."""
        self.size = size
        self._fd, self._changed = fd, os.fstat(fd).st_mtime_ns
        self.lost = False
        """True once mapped bytes have vanished, which makes all copies from the map worthless."""
        flags = mmap.MAP_PRIVATE if own else mmap.MAP_SHARED
        access = mmap.PROT_READ | mmap.PROT_WRITE if own else mmap.PROT_READ
        with warnings.catch_warnings():  # torch warns of memory that is not writable
            warnings.simplefilter("ignore")
            self._pages = mmap.mmap(fd, size, flags, access)
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def parameter(self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor of `nbytes` from `offset` on; its storage is these bytes alone, as copies expect it."""
        found = torch.frombuffer(self._pages, dtype=torch.uint8, count=nbytes, offset=offset)
        return found.view(dtype).view(tuple(shape))

    def view(
        self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """A tensor over `nbytes` from `offset` on, which has to be a multiple of the item size; strides in elements."""
        return self._bytes[offset : offset + nbytes].view(dtype).as_strided(tuple(shape), tuple(strides))

    def close(self) -> None:
        """Drop the map; a second call does nothing."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def has_changed(self) -> bool:
        """True if the file has become shorter, or was written to, since it was mapped; it has to be open still."""
        status = os.fstat(self._fd)
        return status.st_size < self.size or status.st_mtime_ns != self._changed

    def replace(self) -> None:
        """Map zero pages over the file, at the same addresses."""
        self.lost = True
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if libc.mmap(self._bytes.data_ptr(), self.size, mmap.PROT_READ, flags, -1, 0) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap failed")


@contextmanager
def survive_truncation(maps: Sequence[FileMap]) -> Iterator[None]:
    """While the block runs, losing bytes of `maps` marks them as `lost` instead of ending the process.

    Maps of files that did not change keep their bytes, unless none did: then all are lost.

    The main thread has to wait for the threads that read the maps with a timeout, and then `handle_signals()`, over and
    over; `may_map()` first.
    """

    signals = unexplained = 0
    handling = False

    def handle(number: int, frame: Any) -> None:
        nonlocal signals, unexplained, handling
        if handling:  # the thread is signalled on until the map is replaced, and handlers interrupt one another
            return
        handling = True
        try:
            mend()
        finally:
            handling = False

    def mend() -> None:
        nonlocal signals, unexplained
        signals += 1
        if signals > _SIGNALS:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
        intact = [each for each in maps if not each.lost]
        culprits = [each for each in intact if each.has_changed()]
        unexplained = 0 if culprits else unexplained + 1
        # Signals of a fault that is mended by now come late. Without a change, a disk may have failed to give bytes.
        if not culprits and (len(intact) == len(maps) or unexplained > _UNEXPLAINED):
            culprits = intact
        for each in culprits:
            each.replace()

    # Handlers that were not set from Python (faulthandler's) can only be put back as the C library gives them.
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGBUS, None, action)
    before = signal.signal(signal.SIGBUS, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGBUS, signal.SIG_DFL if before is None else before)
        libc.sigaction(signal.SIGBUS, action, None)


def handle_signals() -> None:
    """Run the handlers of signals that have come, if this is the main thread.

    The interpreter would do so by itself, but not reliably while another thread is signalled without end: that thread
    clears, each time, the flag that the main thread looks at.
    """
    if threading.current_thread() is threading.main_thread():
        signal.pthread_kill(threading.get_ident(), 0)  # sends nothing, and then looks for signals


def may_map() -> bool:
    """True where truncation can be survived: on the main thread, which alone handles signals."""
    return hasattr(signal, "SIGBUS") and threading.current_thread() is threading.main_thread()
