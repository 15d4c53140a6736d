"""Byte ranges that ranks need of remote files -> the ranges that each rank fetches. Same result on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ...checkpoint.reading.jobs import Request, is_same_memory
from ...checkpoint.reading.memory import copy
from ...slices.stored import Stored, byte_view

CONNECTIONS = 6
"""Concurrent requests per rank."""
DIRECT_BYTES = 4 << 20
"""Contiguous ranges of at least this many bytes are fetched by the rank that needs them."""
RANGE_BYTES = 32 << 20
"""Most bytes per request that a rank makes for itself."""
BLOCK_BYTES = 16 << 20
"""Most bytes per request that a rank makes for all, and most bytes staged of one tensor."""
GAP_SHARE = 64
"""Gaps between needed bytes are fetched too, up to 1/GAP_SHARE of a range."""

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


class Need:
    """The slice of one stored tensor that a rank needs; on that rank, also its destination."""

    lacking = 0
    """Number of ranges with bytes of it that have not been delivered."""

    def __init__(self, rank: int, file: int, stored: Stored, destination: torch.Tensor | None = None) -> None:
        self.rank, self.file, self.stored, self.destination = rank, file, stored, destination
        self.start, self.stop = stored.start, stored.stop

    @cached_property
    def _ranges(self) -> tuple[Positions, Positions, Positions]:
        """(offsets in the file, lengths, positions in the destination), in file order, in bytes."""
        offsets, lengths = np.array(self.stored.byte_ranges(), dtype=np.int64).reshape(-1, 2).T
        positions = np.cumsum(lengths) - lengths
        order = np.argsort(offsets, kind="stable")
        return offsets[order], lengths[order], positions[order]

    def spans(self) -> list[tuple[int, int]]:
        """Return (start, stop) of every contiguous range, in file order."""
        offsets, lengths, _ = self._ranges
        return list(zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True))

    def within(self, start: int, stop: int) -> tuple[Positions, Positions, Positions]:
        """Return `_ranges` clipped to the bytes [start, stop) of the file."""
        offsets, lengths, positions = self._ranges
        low = int(np.searchsorted(offsets + lengths, start, "right"))
        high = int(np.searchsorted(offsets, stop, "left"))
        offsets, lengths, positions = offsets[low:high], lengths[low:high], positions[low:high]
        skipped = np.maximum(start - offsets, 0)
        ends = np.minimum(offsets + lengths, stop)
        return offsets + skipped, ends - offsets - skipped, positions + skipped

    @cached_property
    def _values(self) -> torch.Tensor:
        assert self.destination is not None
        if is_same_memory(self.destination, self.stored.dtype):
            return self.destination
        # Pinned for copies to a GPU: the driver would stage pageable memory in a buffer of its own.
        pinned = self.destination.device.type != "cpu"
        return torch.empty(self.stored.shape, dtype=self.stored.dtype, pin_memory=pinned)

    @property
    def memory(self) -> memoryview:
        """Memory for the bytes: the destination's, or a temporary tensor until `finish`."""
        return byte_view(self._values)

    def finish(self) -> None:
        """Copy a temporary tensor to the destination, and drop both."""
        if self.destination is not None and self._values is not self.destination:
            copy(self._values, self.destination)
        self.destination = None
        for name in ("_ranges", "_values"):
            self.__dict__.pop(name, None)


@dataclass
class FetchRange:
    """A contiguous range of a file that one request fetches, and the needs that it serves."""

    file: int
    start: int
    stop: int
    needs: list[Need] = field(default_factory=list)
    gaps: int = 0
    """Bytes in the range that no rank needs."""

    def of(self, rank: int) -> list[Need]:
        return [need for need in self.needs if need.rank == rank]


def split_request(request: Request) -> Iterator[Request]:
    """Split the request into blocks of BLOCK_BYTES, unless its bytes go straight into place."""
    if request.tensor.nbytes:
        is_direct = is_same_memory(request.destination, request.tensor.dtype)
        limit = request.tensor.nbytes if is_direct else BLOCK_BYTES
        yield from (Request(*block) for block in request.tensor.chunks(request.destination, limit))


def divide(needs: Iterable[Need], size: int) -> tuple[list[FetchRange], list[list[FetchRange]]]:
    """Return (blocks, ranges by rank): rank i fetches block j if j % size == i, for all; ranges are for itself only.

    A tensor is fetched in ranges if all its needs are long contiguous ranges that do not overlap, else in blocks.
    """
    tensors: dict[tuple[int, int], list[Need]] = defaultdict(list)
    for need in needs:
        tensors[need.file, need.stored.offset].append(need)
    shared: list[Need] = []
    separate: list[list[Need]] = [[] for _ in range(size)]
    for tensor_needs in tensors.values():
        is_long = min(need.stored.shortest_range for need in tensor_needs) >= DIRECT_BYTES
        spans = sorted(span for need in tensor_needs for span in need.spans()) if is_long else []
        overlap = any(start < stop for (_, stop), (start, _) in pairwise(spans))
        for need in tensor_needs:
            (separate[need.rank] if is_long and not overlap else shared).append(need)
    blocks = _split([(need.file, need.start, need.stop) for need in shared], shared, BLOCK_BYTES)
    ranges = [
        _split([(need.file, *span) for need in own for span in need.spans()], own, RANGE_BYTES) for own in separate
    ]
    return blocks, ranges


def _split(spans: Iterable[tuple[int, int, int]], needs: Iterable[Need], limit: int) -> list[FetchRange]:
    """Split the union of `spans` (file, start, stop) into ranges of at most `limit` bytes in file order, with `needs`.

    Spans are joined over gaps that make up at most 1/GAP_SHARE of a range.
    """
    ranges: list[FetchRange] = []
    for file, start, stop in sorted(spans):
        if ranges and ranges[-1].file == file:
            last = ranges[-1]
            gap = max(start - last.stop, 0)
            start = max(start, last.stop)
            length = last.stop - last.start
            if start < stop and gap < limit - length and (last.gaps + gap) * GAP_SHARE <= length:
                last.gaps += gap
                start = last.stop = min(stop, last.start + limit)
        while start < stop:
            ranges.append(FetchRange(file, start, min(start + limit, stop)))
            start = ranges[-1].stop
    starts = [(fetch_range.file, fetch_range.start) for fetch_range in ranges]
    for need in needs:
        number = max(bisect_right(starts, (need.file, need.start)) - 1, 0)
        while number < len(ranges) and (ranges[number].file, ranges[number].start) < (need.file, need.stop):
            ranges[number].needs.append(need)
            need.lacking += 1
            number += 1
    return ranges
