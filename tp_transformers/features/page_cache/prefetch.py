"""Prefetching into a cold page cache: the ranks of a node read each block of the files once, before they read shards.

Otherwise every rank would read a few bytes of every row for a row-parallel shard: from a disk or a network, that is the
complete file. So the spans that the ranks of a node need are split into blocks in file order, and the ranks that need
bytes of a file read its blocks in turn. Blocks in the page cache are skipped; nothing is prefetched if memory is too
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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
_THREADS = 4
"""Concurrent reads per rank; the threads wait for a disk, not for a core."""


def prefetch(
    opened: Sequence[Source | None],
    requests: Sequence[Request],
    group: TensorParallelGroup,
    *,
    wanted: bool | None = None,
) -> int:
    """Read the bytes of `requests` into the page cache, together with the other ranks of this node. Collective.

    `opened` lists the files in one order on all ranks (ranks with another number of files do not share blocks), None
    for a file that this rank does not need. `wanted`:
    True prefetches even if the bytes seem cached, None if some are not cached; False ignores the requests of this rank.

    Returns the bytes that this rank prefetched. Raises CheckpointError on all ranks if one cannot read a file.
    """
    files = [source if isinstance(source, LocalFile) else None for source in opened]

    def need() -> tuple[tuple[str, int], int, bool, list[list[Range]], int]:
        spans = _spans(files, () if wanted is False else requests)
        pairs = zip(files, spans, strict=True)
        cold = wanted or not all(file is None or file.is_resident(ranges) for file, ranges in pairs)
        on_host = sum(request.tensor.nbytes for request in requests) if group.device.type == "cpu" else 0
        return (node_name(), len(files)), group.rank, cold, spans, on_host

    per_rank = group.everywhere(need)
    peers = [entry for entry in per_rank if entry[0] == per_rank[group.rank][0]]
    if not any(entry[2] for entry in peers):
        peers = []  # continue to the vote, since another node may be cold
    total = number = 0
    own_blocks: list[tuple[LocalFile, int, int]] = []
    for index, file in enumerate(files):
        readers = [entry[1] for entry in peers if entry[3][index]]
        for first, stop in union(span for entry in peers for span in entry[3][index]):
            total += stop - first
            for start in range(first, stop, BLOCK_BYTES):
                if file is not None and readers[number % len(readers)] == group.rank:
                    own_blocks.append((file, start, min(start + BLOCK_BYTES, stop)))
                number += 1

    def read_own() -> int:
        if total + sum(entry[4] for entry in peers) > available_memory():
            if group.rank == peers[0][1]:
                logger.info("the page cache has no room for %s that this node needs; not prefetched", size(total))
            return 0
        missing = [block for block in own_blocks if wanted or not block[0].is_resident([block[1:]])]
        with ThreadPoolExecutor(_THREADS, "prefetch", bind_thread, (group.device,)) as pool:
            for _ in pool.map(lambda block: block[0].prefetch(*block[1:]), missing):
                pass
        return sum(stop - start for _, start, stop in missing)

    return group.together(read_own)


def _spans(files: Sequence[LocalFile | None], requests: Sequence[Request]) -> list[list[Range]]:
    """Compute the needed spans of every file, in file order; a span includes the bytes between its rows."""
    spans: dict[LocalFile, list[Range]] = {file: [] for file in files if file is not None}
    for request in requests:
        for block, _ in request.tensor.blocks(request.destination):
            if isinstance(block.source, LocalFile):
                spans[block.source].append((block.start, block.stop))
    return [union(spans[file]) if file is not None else [] for file in files]
