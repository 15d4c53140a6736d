"""Memory that weights are read into: that of the parameters, and staging buffers for copies to a device."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

_SMALLEST = 2 << 20
"""Bytes of a huge page. Smaller tensors are left to the allocator, whose memory has been touched before."""

_MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later; Python's mmap does not define it."""

_SLOW = 0.6e-9
"""Limit in seconds per byte for huge pages: small pages take 0.3e-9, huge ones 0.1e-9 (fast) or 2.2e-9 (slow)."""

_TRIED = 4 << 20
"""Bytes at the start of each tensor that are cleared to time huge pages: at least one page, few if they are slow."""

_TILE_ROWS = 256


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory for a parameter, to be cleared by `Pages` before it is filled."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    _advise(tensor, "MADV_HUGEPAGE")
    return tensor


class Pages:
    """Faults in the pages of CPU memory just before they are filled, many per call; huge pages while they are fast.

    The kernel clears a page when it is first touched. With 4 KiB pages that takes longer than reading the contents:
    from the page cache into new memory 1.9 GB/s, 2.6 with one call for many pages, 6.7 with huge pages; into memory
    that was touched before 12 GB/s. But huge pages are slow to allocate if memory is fragmented or, by far the worst,
    if a hypervisor has reclaimed the free memory of its guest.
    """

    def __init__(self) -> None:
        self._huge_are_fast = True

    def clear(self, tensor: torch.Tensor) -> None:
        """Fault in the memory of a `tensor` made by `empty`, if it is contiguous. Thread-safe."""
        if not tensor.is_contiguous():
            return
        if self._huge_are_fast:
            first = tensor.view(-1)[: _TRIED // tensor.itemsize]
            began = perf_counter()
            _advise(first, _MADV_POPULATE_WRITE)
            self._huge_are_fast = perf_counter() - began <= _SLOW * first.nbytes
        if not self._huge_are_fast:
            _advise(tensor, "MADV_NOHUGEPAGE")
        _advise(tensor, _MADV_POPULATE_WRITE)


def _advise(tensor: torch.Tensor, advice: int | str) -> None:
    """Call madvise on the pages within a tensor; kernels ignore unknown advice."""
    if tensor.device.type != "cpu" or tensor.nbytes < _SMALLEST or not sys.platform.startswith("linux"):
        return
    number = getattr(mmap, advice) if isinstance(advice, str) else advice
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), number)


_libc = ctypes.CDLL(None)


def copy(values: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy `values` (with contiguous rows) to a `destination` of the same shape, of any strides and dtype.

    On a CPU, torch transposes element by element unless both sides are contiguous: 0.26 GB/s of bfloat16, against 2.0
    in tiles.
    """
    if destination.device.type != "cpu":
        destination.copy_(values, non_blocking=True)
    elif values.ndim == 3:
        for matrix, place in zip(values, destination, strict=True):
            copy(matrix, place)
    elif values.ndim == 2 and destination.stride(0) == 1 != destination.stride(1):
        for start in range(0, len(values), _TILE_ROWS):
            tile = values[start : start + _TILE_ROWS].contiguous()
            destination[start : start + _TILE_ROWS].t().copy_(tile.t().contiguous())
    else:
        destination.copy_(values)


class Staging:
    """A pool of host buffers: threads fill them, copies on a side stream empty them.

    Buffers are pinned unless `device` is a CPU, so a copy overlaps with filling the next buffer. Casts and reordering
    happen on the device. `close` waits for the copies.
    """

    def __init__(self, device: torch.device, *, count: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = count * nbytes
        """Bytes of all buffers."""
        # torch.cpu has no-op streams and events, so the code is the same on every device.
        self._module: Any = torch.get_device_module(device.type)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))  # the destinations were allocated on it
        self._free: SimpleQueue[tuple[torch.Tensor, Any]] = SimpleQueue()
        for _ in range(count):
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
            self._free.put((buffer, self._module.Event()))

    @contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        """Wait for a free uint8 buffer; it is reused only after its deliveries are copied."""
        buffer, event = self._free.get()
        try:
            event.synchronize()
            yield buffer
            event.record(self._stream)
        finally:
            self._free.put((buffer, event))

    def deliver(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy contiguous `values` in a buffer to a `destination` of any device, strides and dtype."""
        with self._module.stream(self._stream):
            if values.dtype != destination.dtype or not destination.is_contiguous():
                values = values.to(destination.device, non_blocking=True)
            copy(values, destination)

    def close(self) -> None:
        """Wait for all copies; later work on the device's current stream sees them."""
        self._module.current_stream(self.device).wait_stream(self._stream)
        done = self._module.Event()
        done.record(self._stream)
        done.synchronize()
