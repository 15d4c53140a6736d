"""Memory maps of files, for bytes in the page cache: strided copies need no buffer and no system call per row."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence

import torch


class FileMap:
    """A memory map of a complete file; after `close`, it is unmapped with the last tensor that views it."""

    def __init__(self, fd: int, size: int, *, own: bool = False) -> None:
        """Map the `size` bytes of the open file `fd`, read-only, or copy-on-write if `own`."""
        self.size = size
        self._fd, self._changed = fd, os.fstat(fd).st_mtime_ns
        flags = mmap.MAP_PRIVATE if own else mmap.MAP_SHARED
        access = mmap.PROT_READ | mmap.PROT_WRITE if own else mmap.PROT_READ
        with warnings.catch_warnings():  # torch warns of memory that is not writable
            warnings.simplefilter("ignore")
            self._pages = mmap.mmap(fd, size, flags, access)
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def parameter(self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a contiguous tensor of `nbytes` from `offset` on, whose storage is exactly these bytes."""
        tensor = torch.frombuffer(self._pages, dtype=torch.uint8, count=nbytes, offset=offset)
        return tensor.view(dtype).view(tuple(shape))

    def view(
        self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Return a view of `nbytes` from `offset` on, a multiple of the item size; strides in elements."""
        return self._bytes[offset : offset + nbytes].view(dtype).as_strided(tuple(shape), tuple(strides))

    def close(self) -> None:
        """Drop the map; safe to call twice."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def has_changed(self) -> bool:
        """Return True if the file was truncated or modified since it was mapped; `fd` must still be open."""
        status = os.fstat(self._fd)
        return status.st_size < self.size or status.st_mtime_ns != self._changed
