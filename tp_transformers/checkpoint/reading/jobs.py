"""Slice requests -> jobs: the unit of work of a reading thread, in file order.

A contiguous range of the file whose bytes equal the destination's is read straight into place; neighbouring ranges take
one call, also across tensors. Strided rows use the method that `costs` estimates as cheapest. Bytes in the page cache
can be copied out of a memory map into any strides and dtype; other bytes for another device, dtype or strided memory go
through a staging buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from ...slices.source import Source
from ...slices.stored import Stored, byte_view
from .costs import BLOCK_BYTES, cheapest
from .local_file import LocalFile
from .memory import Pages, Staging, copy

JOB_BYTES = 16 << 20
"""Most bytes per job: large enough to amortise a call and a copy to a device, small enough to balance threads and to
bound the staging buffers, which have this size."""

_BUFFERS_A_CALL = 512


@dataclass(frozen=True)
class Request:
    """Read `tensor` into `destination`, which has the same shape and any strides, device and dtype (cast to it)."""

    tensor: Stored
    destination: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """True if it is one contiguous range of the file whose bytes equal the destination's, in the same order."""
        return self.tensor.rows == 1 and is_same_memory(self.destination, self.tensor.dtype)


@dataclass
class Method:
    """Totals of one method to read."""

    nbytes: int = 0
    """Bytes of destinations."""
    copied: int = 0
    """Bytes copied into memory: more than `nbytes` if complete rows are read."""
    seconds: float = 0.0
    """Summed over threads."""


@dataclass
class Statistics:
    """Totals of one call of `read`."""

    methods: dict[str, Method] = field(default_factory=dict)
    """Totals by method: `contiguous`, and the methods of `costs`."""
    seconds: float = 0.0
    peak_buffer: int = 0
    """Bytes of all buffers besides the destinations."""

    def add(self, other: Statistics) -> None:
        """Add the totals of a later call."""
        for name, way in other.methods.items():
            total = self.methods.setdefault(name, Method())
            total.nbytes, total.copied = total.nbytes + way.nbytes, total.copied + way.copied
            total.seconds += way.seconds
        self.seconds += other.seconds
        self.peak_buffer = max(self.peak_buffer, other.peak_buffer)


def is_same_memory(destination: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if values of `dtype` in a file have the same bytes, in the same order, as in `destination`."""
    return destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()


class Context:
    """State shared by the jobs of one call: staging buffers, page clearing and totals."""

    def __init__(self, staging: Staging | None, statistics: Statistics) -> None:
        self.staging, self.statistics, self.pages = staging, statistics, Pages()
        self._lock = threading.Lock()

    def count(self, method: str, nbytes: int, copied: int, seconds: float) -> None:
        """Add to the totals of `method`."""
        with self._lock:
            entry = self.statistics.methods.setdefault(method, Method())
            entry.nbytes += nbytes
            entry.copied += copied
            entry.seconds += seconds


@dataclass(frozen=True)
class Job:
    """The read of one block, or of several neighbouring blocks that are read into place."""

    pieces: Sequence[Request]
    method: str

    @property
    def nbytes(self) -> int:
        return sum(piece.tensor.nbytes for piece in self.pieces)

    @property
    def device(self) -> torch.device:
        return self.pieces[0].destination.device

    @property
    def is_staged(self) -> bool:
        """True if the values pass through a staging buffer."""
        if self.device.type != "cpu":
            return True
        return self.method != "map" and not is_same_memory(self.pieces[0].destination, self.pieces[0].tensor.dtype)

    def run(self, context: Context) -> None:
        """Read the blocks, through a staging buffer if `is_staged`."""
        began = perf_counter()
        box, destination = self.pieces[0].tensor, self.pieces[0].destination
        if len(self.pieces) > 1:
            copied = self.nbytes
            for piece in self.pieces:
                context.pages.clear(piece.destination)
            box.source.read(box.start, [byte_view(piece.destination) for piece in self.pieces])
        elif self.is_staged:
            assert context.staging is not None
            with context.staging.buffer() as buffer:
                values = buffer[: box.nbytes].view(box.dtype).view(box.shape)
                copied = _READERS[self.method](box, values)
                context.staging.deliver(values, destination)
        else:
            context.pages.clear(destination)
            copied = _READERS[self.method](box, destination)
        context.count(self.method, self.nbytes, copied, perf_counter() - began)


def _read_blocks(box: Stored, destination: torch.Tensor) -> int:
    """Read complete rows into a buffer, and copy the ranges out of it."""
    buffer = torch.empty(max(min(BLOCK_BYTES, box.span), box.shortest_run), dtype=torch.uint8)
    copied = 0
    for part, place in box.cut(destination, len(buffer), by_span=True):
        block = buffer[: part.span]
        part.source.read(part.start, [byte_view(block)])
        copy(block.view(part.dtype).as_strided(part.shape, part.strides), place)
        copied += part.span
    return copied


def _read_map(box: Stored, destination: torch.Tensor) -> int:
    assert isinstance(box.source, LocalFile)
    copy(box.source.map().view(box.start, box.span, box.dtype, box.shape, box.strides), destination)
    box.source.count(box.nbytes)
    return box.nbytes


_READERS: dict[str, Callable[[Stored, torch.Tensor], int]] = {
    "contiguous": Stored.read,
    "reads": Stored.read,
    "blocks": _read_blocks,
    "map": _read_map,
}
"""Name of a method -> a function that reads a block into a host tensor and returns the number of bytes copied."""


def cut(request: Request) -> Iterator[Request]:
    """Split `request` into blocks of at most JOB_BYTES."""
    for box, destination in request.tensor.boxes(request.destination):
        yield from (Request(*part) for part in box.cut(destination, JOB_BYTES))


def order(pieces: Sequence[Request], mapped: Sequence[Source]) -> Iterator[Job]:
    """Group blocks in file order into jobs in file order."""
    together: list[Request] = []
    nbytes = 0
    for piece in pieces:
        box = piece.tensor
        follows = (
            piece.is_direct
            and together
            and box.source is together[-1].tensor.source
            and box.start == together[-1].tensor.stop
            and nbytes + box.nbytes <= JOB_BYTES
            and len(together) < _BUFFERS_A_CALL
        )
        if together and not follows:
            yield Job(together, "contiguous")
            together, nbytes = [], 0
        if piece.is_direct:
            together.append(piece)
            nbytes += box.nbytes
        else:
            yield Job([piece], _method(piece, box.source in mapped))
    if together:
        yield Job(together, "contiguous")


def _method(piece: Request, is_mapped: bool) -> str:
    """Choose the method for a block that is not read into place: `map` only for bytes in the page cache."""
    box = piece.tensor
    if is_mapped:
        assert isinstance(box.source, LocalFile)
        is_mapped = box.start % box.dtype.itemsize == 0 and box.source.is_resident([(box.start, box.stop)])
    if box.rows > 1:
        return cheapest(box, may_map=is_mapped)
    return "map" if is_mapped and piece.destination.device.type == "cpu" else "contiguous"
