"""A check that all ranks read the same checkpoint, also from copies on several nodes.

Ranks compare sizes, hashes of headers and, if known, commits and ETags. All of these may be equal for two fine-tunes of
one architecture. So if ranks read different copies (not the same inode on the same node), one rank per copy also hashes
a few blocks, and the hashes are compared.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...checkpoint.reading.header import Checkpoint
from ...checkpoint.reading.local_file import LocalFile
from ...errors import CheckpointError
from ...ranks.environment import node_name
from ...ranks.group import TensorParallelGroup, agreed, bind_thread
from ...slices.stored import Source

_THREADS = 8
"""Files that a rank samples concurrently; the threads wait for a disk or a network, not for a core."""

BLOCKS, BLOCK_BYTES = 16, 4 << 10
"""Number and bytes of the blocks that `sample` hashes."""

_COMMIT = re.compile(r"/(?:snapshots|resolve)/([0-9a-f]{40})/")
"""The commit in the path of a file in the Hub's cache, or in its URL."""

View = Mapping[str, object]
"""A file on one rank: its path, the values that ranks compare (None if unknown), and the identity of its copy."""


def _view(source: Source) -> View:
    """Return this rank's view of an open file after its header was read; `copy` is None for a file on the Hub."""
    view = {"path": source.name, "size": source.size, "header": source.header_hash}
    if not isinstance(source, LocalFile):
        return {**view, "commit": _commit(source.address), "etag": source.etag, "copy": None}
    blob = Path(os.path.realpath(source.name))  # in the Hub's cache, a link to a file named by its ETag
    etag = blob.name if blob.parent.name == "blobs" else None
    return {**view, "commit": _commit(source.name), "etag": etag, "copy": (node_name(), *source.identity)}


def check_same_files(group: TensorParallelGroup, checkpoint: Checkpoint) -> int:
    """Compare the files that the ranks have opened; return how many bytes this rank sampled.

    Collective: call on all ranks. Nothing is sampled if the ranks read the same copies.

    Raises CheckpointError on all ranks, with the file and the rank, if two ranks have opened different files.
    """
    views = (_view(source) if source is not None else None for source in checkpoint.opened)
    per_rank = group.everywhere(lambda: (checkpoint.signature, list(views)))
    _compare(None, "list of files", dict(enumerate(signature for signature, _ in per_rank)))
    by_file = zip(*(opened for _, opened in per_rank), strict=True)
    files = [{rank: seen for rank, seen in enumerate(ranks) if seen is not None} for ranks in by_file]
    for file in files:
        for trait in ("size", "header", "commit", "etag"):
            _compare(file, trait, {rank: view[trait] for rank, view in file.items()})
    samplers = [_samplers(number, file) for number, file in enumerate(files)]
    if not any(samplers):
        return 0
    own = {
        number: source
        for number, (source, ranks) in enumerate(zip(checkpoint.opened, samplers, strict=True))
        if group.rank in ranks and isinstance(source, LocalFile)
    }

    def sample_all() -> dict[int, tuple[str, int]]:
        with ThreadPoolExecutor(_THREADS, "sample", bind_thread, (group.device,)) as pool:
            return dict(zip(own, pool.map(sample, own.values()), strict=True))

    samples = group.gather(group.together(sample_all))
    for number, (file, ranks) in enumerate(zip(files, samplers, strict=True)):
        _compare(file, "content", {rank: samples[rank][number][0] for rank in ranks})
    return sum(nbytes for _, nbytes in samples[group.rank].values())


def sample(file: LocalFile) -> tuple[str, int]:
    """Hash a few blocks, at offsets that depend on the file size only, and count their bytes, which are not part of
    `bytes_read`; a short file is hashed completely."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    block, room = memoryview(bytearray(BLOCK_BYTES)), max(file.size - BLOCK_BYTES, 0)
    count = min(BLOCKS, -(-file.size // BLOCK_BYTES))
    for offset in (room * index // max(count - 1, 1) for index in range(count)):
        length = file.preadv([block], offset)
        digest.update(block[:length])
        nbytes += length
    return digest.hexdigest(), nbytes


def _commit(path: str) -> str | None:
    match = _COMMIT.search(path)
    return match and match[1]


def _samplers(number: int, file: Mapping[int, View]) -> list[int]:
    """Choose one rank per copy of a file; none if there is one copy. Ranks of one copy take turns over the files."""
    readers: dict[object, list[int]] = {}
    for rank, view in file.items():
        if view["copy"] is not None:
            readers.setdefault(view["copy"], []).append(rank)
    return sorted(ranks[number % len(ranks)] for ranks in readers.values()) if len(readers) > 1 else []


def _compare(file: Mapping[int, View] | None, trait: str, values: Mapping[int, object]) -> None:
    """Raise CheckpointError if ranks have different `values`; None is unknown and not compared."""
    known = {rank: value for rank, value in values.items() if value is not None}
    first = min(known, default=0)
    for rank, value in known.items():
        if value != known[first]:
            path = f" ({file[rank]['path']})" if file is not None else ""
            raise agreed(
                CheckpointError(
                    f"checkpoint file {file[first]['path']}" if file is not None else "the checkpoint",
                    got=f"another {trait} on rank {rank}{path} than on rank {first}",
                    expected="the same on all ranks",
                    fix="One of them is another checkpoint, or an older copy; copy or download it again.",
                )
            )
