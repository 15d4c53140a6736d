"""Prefetching into a cold page cache: the ranks of a node read each block of the files once, while they read shards.

Otherwise every rank would read a few bytes of every row for a row-parallel shard: from a disk or a network, that is the
complete file. So the spans that the ranks of a node need are split into blocks in file order, and the ranks that need
bytes of a file read its blocks in turn. Reads of shards follow: those of ranges of rows wait for their bytes. Blocks in
the page cache are skipped; nothing is prefetched if memory is too small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep

from ...checkpoint.reading.jobs import Request
from ...checkpoint.reading.local_file import LocalFile
from ...errors import size
from ...logs import get_logger
from ...ranks.environment import node_name
from ...ranks.group import TensorParallelGroup, bind_thread
from ...ranks.limits import available_memory
from ...slices.layout import Range, union
from ...slices.stored import Source

logger = get_logger(__name__)

BLOCK_BYTES = 16 << 20
_CALL_BYTES = 1 << 20
THREADS = 4
"""Concurrent reads per rank; the threads wait for a disk, not for a core."""

_POLL = 0.001
"""Seconds between two looks for bytes that another rank may read."""

_PATIENCE = 1.0
"""Seconds that the reads of a load wait, in all, for other ranks after this rank has read its blocks."""


@contextmanager
def prefetching(
    opened: Sequence[Source | None],
    requests: Sequence[Request],
    group: TensorParallelGroup,
    *,
    wanted: bool | None = None,
) -> Iterator[Mapping[str, int]]:
    """Read the bytes of `requests` into the page cache during the block, with the other ranks of this node. Collective.

    `opened` lists the files in one order on all ranks (ranks with another number of files do not share blocks), None
    for a file that this rank does not need. `wanted`: True prefetches even if the bytes seem cached, None if some are
    not cached; False ignores the requests of this rank.

    Gives the number of bytes that this rank prefetches. At the end of the block, all bytes are in the page cache.
    Raises CheckpointError on all ranks if one cannot read a file.
    """
    files = [source if isinstance(source, LocalFile) else None for source in opened]
    blocks, may_overlap = _own_blocks(files, requests, group, wanted)
    with ThreadPoolExecutor(THREADS, "prefetch", bind_thread, (group.device,)) as pool:
        reads = [pool.submit(fetch, *block) for block in blocks or ()]

        def join() -> None:
            for read in reads:
                read.result()

        try:
            if not may_overlap:
                group.together(join)
            elif blocks is not None:
                for file in filter(None, files):
                    file.wait = Arrival(file, reads)
            yield {"prefetched": sum(stop - start for _, start, stop in blocks or ())}
            if may_overlap:
                group.together(join)
        finally:
            for read in reads:
                read.cancel()
            for file in filter(None, files):
                file.wait = None


class Arrival:
    """Waits for bytes of a file that the ranks of this node read into the page cache."""

    def __init__(self, file: LocalFile, reads: Sequence[Future[None]]) -> None:
        """`reads`: those of this rank, of all files."""
        self.file, self.reads, self.patience = file, reads, _PATIENCE

    def __call__(self, start: int, stop: int) -> None:
        """Return when the bytes [start, stop) are in the page cache, or can no longer be expected."""
        while self.patience > 0 and not self.file.is_resident([(start, stop)]):
            sleep(_POLL)
            if all(read.done() for read in reversed(self.reads)):
                self.patience -= _POLL


def fetch(file: LocalFile, start: int, stop: int) -> None:
    """Read the bytes [start, stop) into the page cache.

    Linux sends them to /dev/null without a copy, in a quarter of the processor's time that reads into a buffer take.
    """
    try:
        with open(os.devnull, "wb", buffering=0) as sink:
            while start < stop and (count := os.sendfile(sink.fileno(), file.fd, start, stop - start)):
                start += count
    except OSError:  # another system, a file system that cannot do that, or a fault, which the read tells
        scratch = memoryview(bytearray(min(stop - start, _CALL_BYTES)))
        for offset in range(start, stop, _CALL_BYTES):
            file.preadv([scratch[: stop - offset]], offset)


Block = tuple[LocalFile, int, int]
"""(file, start, stop) in bytes."""


def _own_blocks(
    files: Sequence[LocalFile | None], requests: Sequence[Request], group: TensorParallelGroup, wanted: bool | None
) -> tuple[list[Block] | None, bool]:
    """The blocks that this rank reads, None if nobody on the node reads; whether all ranks can see bytes arrive."""

    def need() -> tuple[tuple[str, int], int, bool, bool, list[list[Range]], int]:
        spans = _spans(files, () if wanted is False else requests)
        pairs = zip(files, spans, strict=True)
        cold = wanted or not all(file is None or file.is_resident(ranges) for file, ranges in pairs)
        tells = all(file is None or file.is_resident([(0, 1)]) for file in files)  # headers have been read
        on_host = sum(request.tensor.nbytes for request in requests) if group.device.type == "cpu" else 0
        return (node_name(), len(files)), group.rank, cold, tells, spans, on_host

    per_rank = group.everywhere(need)
    may_overlap = all(entry[3] for entry in per_rank)
    peers = [entry for entry in per_rank if entry[0] == per_rank[group.rank][0]]
    if not any(entry[2] for entry in peers):
        return None, may_overlap
    total = number = 0
    own: list[Block] = []
    for index, file in enumerate(files):
        readers = [entry[1] for entry in peers if entry[4][index]]
        for first, stop in union(span for entry in peers for span in entry[4][index]):
            total += stop - first
            for start in range(first, stop, BLOCK_BYTES):
                if file is not None and readers[number % len(readers)] == group.rank:
                    own.append((file, start, min(start + BLOCK_BYTES, stop)))
                number += 1
    if total + sum(entry[5] for entry in peers) > available_memory():
        if group.rank == peers[0][1]:
            logger.info("the page cache has no room for %s that this node needs; not prefetched", size(total))
        return None, may_overlap
    return [block for block in own if wanted or not block[0].is_resident([block[1:]])], may_overlap


def _spans(files: Sequence[LocalFile | None], requests: Sequence[Request]) -> list[list[Range]]:
    """Compute the needed spans of every file, in file order; a span includes the bytes between its rows."""
    spans: dict[LocalFile, list[Range]] = {file: [] for file in files if file is not None}
    for request in requests:
        for block, _ in request.tensor.blocks(request.destination):
            if isinstance(block.source, LocalFile):
                spans[block.source].append((block.start, block.stop))
    return [union(spans[file]) if file is not None else [] for file in files]
