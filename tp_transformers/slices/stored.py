"""Files to read bytes from (`Source`, one subclass a storage), and the tensors in a file, with the bytes of a slice."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import product
from threading import Lock
from typing import Any

import torch

from ..errors import CheckpointError
from .layout import Range, joined, overlaps, placed
from .lazy import LazyTensor


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
    wait: Callable[[int, int], object] | None = None
    """Waits until the bytes [start, stop) are in the page cache, which somebody fills meanwhile; None: nobody does."""

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


Selection = tuple[tuple[Range, ...], ...]
"""For each dim, the selected index ranges, in order."""


class Stored(LazyTensor):
    """A slice of a row-major tensor in a file. The byte ranges of a block are evenly spaced."""

    def __init__(
        self,
        source: Source,
        *,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        selection: Selection | None = None,
    ) -> None:
        self.source = source
        self.offset = offset
        self.stored_shape = tuple(shape)
        self.selection = selection or tuple(((0, length),) for length in self.stored_shape)
        self.shape = torch.Size(lengths(self.selection))
        self.dtype = dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Stored:
        """Slice this slice; the ranges refer to the current shape."""
        return self._with(dim, compose(self.selection[dim], ranges))

    def extended(self, other: LazyTensor, dim: int) -> Stored | None:
        """Concatenate with `other` along `dim` as one slice of the stored tensor; None where that is impossible."""
        if not isinstance(other, Stored) or (self.source, self.offset) != (other.source, other.offset):
            return None
        candidate = self._with(dim, other.selection[dim])
        if (candidate.selection, candidate.stored_shape) != (other.selection, other.stored_shape):
            return None
        return self._with(dim, tuple(joined((*self.selection[dim], *other.selection[dim]))) or ((0, 0),))

    def _with(self, dim: int, ranges: tuple[Range, ...]) -> Stored:
        selection = list(self.selection)
        selection[dim] = ranges
        return self._selected(tuple(selection))

    def _selected(self, selection: Selection) -> Stored:
        return Stored(self.source, offset=self.offset, shape=self.stored_shape, dtype=self.dtype, selection=selection)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the stored tensor, in elements."""
        return tuple(math.prod(self.stored_shape[dim + 1 :]) for dim in range(len(self.stored_shape)))

    @cached_property
    def looped(self) -> int:
        """Number of leading dims up to the last sliced one; all dims after it lie within one byte range."""
        partial = [dim for dim, length in enumerate(self.stored_shape) if self.selection[dim] != ((0, length),)]
        return partial[-1] + 1 if partial else 0

    @cached_property
    def shortest_range(self) -> int:
        """Length in bytes of the shortest byte range."""
        if not self.looped:
            return self.nbytes
        last = self.looped - 1
        return min(stop - start for start, stop in self.selection[last]) * self.strides[last] * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Number of byte ranges of a block, which all have the same length."""
        return self.nbytes // self.shortest_range

    @cached_property
    def start(self) -> int:
        """File offset of the first selected byte."""
        firsts = (min(start for start, _ in ranges) for ranges in self.selection)
        return self.offset + self._distance(firsts)

    @cached_property
    def span(self) -> int:
        """Bytes of the file from the first selected byte to the last, both included."""
        lasts = (max(stop for _, stop in ranges) - 1 for ranges in self.selection)
        return self.offset + self._distance(lasts) + self.dtype.itemsize - self.start

    @property
    def stop(self) -> int:
        """File offset after the last selected byte."""
        return self.start + self.span

    def _distance(self, index: Iterable[int]) -> int:
        return sum(at * stride for at, stride in zip(index, self.strides, strict=True)) * self.dtype.itemsize

    def byte_ranges(self) -> list[tuple[int, int]]:
        """The byte ranges as (file offset, byte count), in the order of the selected elements.

        Adjacent ranges are joined: a slice of the first dim is one byte range, a slice of the last dim one per row.
        """
        if not all(self.shape):
            return []
        if not self.looped:
            return [(self.offset, self.nbytes)]
        *outer, inner = [
            (ranges, stride * self.dtype.itemsize)
            for ranges, stride in zip(self.selection[: self.looped], self.strides, strict=False)
        ]
        rows = [self.offset]
        for ranges, step in outer:
            indices = [index * step for start, stop in ranges for index in range(start, stop)]
            rows = [row + index for row in rows for index in indices]
        of_row = [(start * inner[1], (stop - start) * inner[1]) for start, stop in inner[0]]
        return [(row + start, length) for row in rows for start, length in of_row]

    def blocks(self, destination: torch.Tensor) -> Iterator[tuple[Stored, torch.Tensor]]:
        """The slice as non-empty blocks (one range per dim), each with its view of `destination`."""
        if self.nbytes and all(len(ranges) == 1 for ranges in self.selection):
            yield self, destination
            return
        places = [list(placed(ranges)) for ranges in self.selection]
        for ranges in product(*places):
            view = destination
            for dim, (start, stop, position) in enumerate(ranges):
                if len(places[dim]) > 1:
                    view = view.narrow(dim, position, stop - start)
            yield self._selected(tuple(((start, stop),) for start, stop, _ in ranges)), view

    def chunks(
        self, destination: torch.Tensor, limit: int, *, by_span: bool = False
    ) -> Iterator[tuple[Stored, torch.Tensor]]:
        """Split into slices of at most `limit` bytes (values or span), each with its view of `destination`."""
        nbytes = self.span if by_span else self.nbytes
        dim = next((dim for dim, length in enumerate(self.shape) if length > 1), None)
        if nbytes <= limit or dim is None:
            yield self, destination
            return
        length = self.shape[dim]
        step = max(limit * length // nbytes, 1)
        for start in range(0, length, step):
            stop = min(start + step, length)
            selected = self.select(dim, [(start, stop)])
            yield from selected.chunks(destination.narrow(dim, start, stop - start), limit, by_span=by_span)

    def read(self, destination: torch.Tensor) -> int:
        """Read each byte range into contiguous CPU memory of `shape` and `dtype`; returns the number of bytes."""
        view, position = byte_view(destination), 0
        for offset, length in self.byte_ranges():
            self.source.read(offset, [view[position : position + length]])
            position += length
        return position

    def materialize(self) -> torch.Tensor:
        """Read the slice through the source."""
        result = torch.empty(self.shape, dtype=self.dtype)
        self.read(result)
        return result


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as a writable memoryview of format "B"."""
    # A dim of length 1 may have any stride in a contiguous tensor, and would keep it through `view(-1)`.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def lengths(selection: Selection) -> list[int]:
    """Number of selected indices of each dim."""
    return [sum(stop - start for start, stop in ranges) for ranges in selection]


def compose(current: Sequence[Range], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Slice a slice: `ranges` refer to the concatenation of `current`."""
    parts = overlaps([stop - start for start, stop in current], ranges)
    spans = joined((current[part][0] + start, current[part][0] + stop) for part, start, stop in parts)
    return tuple(spans) or ((0, 0),)
