"""Slice requests -> jobs: the unit of work of a reading thread, in file order.

A contiguous range of the file whose bytes equal the destination's is read straight into place; neighbouring ranges take
one call, also across tensors. Bytes in the page cache can be copied out of a memory map into any strides and dtype;
other bytes for another device, dtype or strided memory go through a staging buffer.

A shard of a trailing dim is `rows` ranges of `length` bytes, `stride` bytes apart in the file. There are three methods
to read rows; `cheapest` chooses one by the gap between two ranges:

- `map`: copy the ranges out of a memory map, if the bytes are in the page cache;
- `blocks`: read complete rows into a buffer that stays in the CPU cache, and copy the ranges out of it;
- `reads`: one read per row, of the shard's bytes only.

Measured on one core of an AMD EPYC (2 MiB of L2 cache, Linux 6.18, ext4, warm page cache) into memory that had been
touched before, in GB/s of the shard's own bytes:

    length of stride    reads   blocks   map
    14,336 of 28,672     4.02     5.75  9.92
     7,168 of 28,672     3.10     3.24  9.50
     3,584 of 28,672     2.05     1.77  7.70
     4,096 of  8,192     2.29     5.86 10.32
     1,024 of  8,192     0.78     1.89  5.32
     2,048 of  4,096     1.09     5.77  8.34
       512 of  1,024     0.45     5.28  6.93

One contiguous read gave 12.2 GB/s there, and a call took 1.4e-6 s: as long as to copy the 16 KiB of a short gap into a
buffer, or to map and unmap the pages of 256 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...slices.stored import Stored, byte_view
from .local_file import LocalFile
from .memory import Pages, Staging, copy

Progress = Callable[[int], object]
"""Called with numbers of bytes that have arrived."""

BLOCK_BYTES = 1 << 20
"""Size of the buffer for `blocks`."""

_GAP_OF_BLOCKS = 16 << 10
"""Bytes between two ranges up to which reading them is faster than another call."""
_GAP_OF_MAP = 256 << 10
"""Bytes between two ranges up to which mapping their pages is faster than another call."""


def cheapest(block: Stored, *, may_map: bool) -> str:
    """Name the fastest method for the rows, two or more, of `block`; `may_map`: its bytes are in the page cache."""
    gap = (block.span - block.nbytes) // (block.rows - 1)
    if may_map and gap <= _GAP_OF_MAP:
        return "map"
    return "blocks" if gap <= _GAP_OF_BLOCKS else "reads"


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


class Method(NamedTuple):
    """Totals of one method to read."""

    nbytes: int = 0
    """Bytes of destinations."""
    copied: int = 0
    """Bytes copied into memory: more than `nbytes` if complete rows are read."""
    seconds: float = 0.0
    """Summed over threads."""


@dataclass
class Statistics:
    """Totals of calls of `read`."""

    methods: dict[str, Method] = field(default_factory=dict)
    """Totals by method: `contiguous`, and those for rows."""
    seconds: float = 0.0
    peak_buffer: int = 0
    """Most bytes of all buffers besides the destinations, in one call."""

    def count(self, method: str, nbytes: int, copied: int, seconds: float) -> None:
        """Add to the totals of `method`."""
        before = self.methods.get(method, Method())
        self.methods[method] = Method(before.nbytes + nbytes, before.copied + copied, before.seconds + seconds)


def is_same_memory(destination: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if values of `dtype` in a file have the same bytes, in the same order, as in `destination`."""
    return destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous()


@dataclass(frozen=True)
class Job:
    """The read of one block, or of several neighbouring blocks that are read into place."""

    requests: Sequence[Request]
    method: str

    @property
    def nbytes(self) -> int:
        return sum(request.tensor.nbytes for request in self.requests)

    @property
    def device(self) -> torch.device:
        return self.requests[0].destination.device

    @property
    def is_staged(self) -> bool:
        """True if the values pass through a staging buffer."""
        if self.device.type != "cpu":
            return True
        return self.method != "map" and not is_same_memory(self.requests[0].destination, self.requests[0].tensor.dtype)

    def run(self, staging: Staging | None, pages: Pages) -> int:
        """Read the blocks, through a staging buffer if `is_staged`; returns the number of bytes copied into memory."""
        block, destination = self.requests[0].tensor, self.requests[0].destination
        if block.source.wait is not None and self.method != "contiguous":
            block.source.wait(block.start, block.stop)
        if self.is_staged:
            assert staging is not None
            with staging.buffer() as buffer:
                values = buffer[: block.nbytes].view(block.dtype).view(block.shape)
                copied = _READERS[self.method](block, values)
                staging.deliver(values, destination)
            return copied
        for request in self.requests:
            pages.clear(request.destination)
        if len(self.requests) == 1:
            return _READERS[self.method](block, destination)
        block.source.read(block.start, [byte_view(request.destination) for request in self.requests])
        return self.nbytes


def _read_blocks(block: Stored, destination: torch.Tensor) -> int:
    """Read complete rows into a buffer, and copy the ranges out of it."""
    buffer = torch.empty(max(min(BLOCK_BYTES, block.span), block.shortest_range), dtype=torch.uint8)
    copied = 0
    for rows, place in block.chunks(destination, len(buffer), by_span=True):
        content = buffer[: rows.span]
        rows.source.read(rows.start, [byte_view(content)])
        copy(content.view(rows.dtype).as_strided(rows.shape, rows.strides), place)
        copied += rows.span
    return copied


def _read_map(block: Stored, destination: torch.Tensor) -> int:
    assert isinstance(block.source, LocalFile)
    values = block.source.pages(block.start, block.span).view(block.dtype)
    copy(values.as_strided(block.shape, block.strides), destination)
    block.source.count(block.nbytes)
    return block.nbytes


_READERS: dict[str, Callable[[Stored, torch.Tensor], int]] = {
    "contiguous": Stored.read,
    "reads": Stored.read,
    "blocks": _read_blocks,
    "map": _read_map,
}
"""Name of a method -> a function that reads a block into a host tensor and returns the number of bytes copied."""


def split(request: Request) -> Iterator[Request]:
    """Split `request` into blocks of at most JOB_BYTES."""
    for block, destination in request.tensor.blocks(request.destination):
        yield from (Request(*entry) for entry in block.chunks(destination, JOB_BYTES))


def order(requests: Sequence[Request]) -> Iterator[Job]:
    """Group blocks in file order into jobs in file order."""
    neighbours: list[Request] = []
    nbytes = 0
    for request in requests:
        block = request.tensor
        follows = (
            request.is_direct
            and neighbours
            and block.source is neighbours[-1].tensor.source
            and block.start == neighbours[-1].tensor.stop
            and nbytes + block.nbytes <= JOB_BYTES
            and len(neighbours) < _BUFFERS_A_CALL
        )
        if neighbours and not follows:
            yield Job(neighbours, "contiguous")
            neighbours, nbytes = [], 0
        if request.is_direct:
            neighbours.append(request)
            nbytes += block.nbytes
        else:
            yield Job([request], _method(request))
    if neighbours:
        yield Job(neighbours, "contiguous")


def _method(request: Request) -> str:
    """Choose the method for a block that is not read into place: `map` only for bytes in the page cache."""
    block, source = request.tensor, request.tensor.source
    may_map = (
        isinstance(source, LocalFile)
        and source.has_map
        and block.start % block.dtype.itemsize == 0
        and (source.wait is not None or source.is_resident([(block.start, block.stop)]))
    )
    if block.rows > 1:
        return cheapest(block, may_map=may_map)
    return "map" if may_map and request.destination.device.type == "cpu" else "contiguous"
