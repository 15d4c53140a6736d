"""Prefetching into a cold page cache: the ranks of a node read each block of the files once, before they read shards.

Otherwise every rank would read a few bytes of every row for a row-parallel shard: from a disk or a network, that is the
complete file. So the spans that the ranks of a node need are split into blocks in file order, and the ranks that need
bytes of a file read its blocks in turn. Blocks in the page cache are skipped; nothing is prefetched if memory is too
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...logs import get_logger
from ...ranks.environment import node_name
from ...ranks.group import TensorParallelGroup, bind_thread
from ...slices.layout import Range, union
from ...slices.source import Source
from ...text import size
from .jobs import Request
from .local_file import LocalFile

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

    `opened` lists the files in the same order on all ranks, None for a file that this rank does not need. `wanted`:
    True prefetches even if the bytes seem cached, None if some are not cached; False ignores the requests of this rank.

    Returns the bytes that this rank prefetched. Raises CheckpointError on all ranks if one cannot read a file.
    """
    files = [source if isinstance(source, LocalFile) else None for source in opened]

    def need() -> tuple[str, int, bool, list[list[Range]], int]:
        spans = _spans(files, () if wanted is False else requests)
        pairs = zip(files, spans, strict=True)
        cold = wanted or not all(file is None or file.is_resident(held) for file, held in pairs)
        return node_name(), group.rank, cold, spans, sum(request.tensor.nbytes for request in requests)

    everyone = group.everywhere(need)
    others = [each for each in everyone if each[0] == everyone[group.rank][0]]
    if not any(each[2] for each in others):
        others = []  # continue to the vote, since another node may be cold
    total = turn = 0
    mine: list[tuple[LocalFile, int, int]] = []
    for index, file in enumerate(files):
        readers = [each[1] for each in others if each[3][index]]
        for first, stop in union(span for each in others for span in each[3][index]):
            total += stop - first
            for start in range(first, stop, BLOCK_BYTES):
                if file is not None and readers[turn % len(readers)] == group.rank:
                    mine.append((file, start, min(start + BLOCK_BYTES, stop)))
                turn += 1

    def bring() -> int:
        if total + sum(each[4] for each in others) > _available_memory():
            if group.rank == others[0][1]:
                logger.info("the page cache has no room for %s that this node needs; not prefetched", size(total))
            return 0
        lacking = [block for block in mine if wanted or not block[0].is_resident([block[1:]])]
        with ThreadPoolExecutor(_THREADS, "prefetch", bind_thread, (group.device,)) as pool:
            for _ in pool.map(lambda block: block[0].prefetch(*block[1:]), lacking):
                pass
        return sum(stop - start for _, start, stop in lacking)

    return group.together(bring)


def _spans(files: Sequence[LocalFile | None], requests: Sequence[Request]) -> list[list[Range]]:
    """Compute the needed spans of every file, in file order; a span includes the bytes between its rows."""
    spans: dict[LocalFile, list[Range]] = {file: [] for file in files if file is not None}
    for request in requests:
        for box, _ in request.tensor.boxes(request.destination):
            if isinstance(box.source, LocalFile):
                spans[box.source].append((box.start, box.stop))
    return [union(spans[file]) if file is not None else [] for file in files]


def _available_memory() -> float:
    """Return the bytes available without swapping; infinity if unknown."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")
