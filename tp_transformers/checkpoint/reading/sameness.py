"""A check that ranks which read files of one name on several nodes read the same files.

Ranks compare sizes, hashes of headers and, if they are known, commits and ETags. Two fine-tunes of one architecture may
have all of them alike: if ranks have copies of their own (not one inode of one node), one rank reads a few blocks of
each copy too, and their hashes are compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import CheckpointError
from ...ranks.group import TensorParallelGroup, agreed, bind_thread
from ...slices.source import Source
from ..hub.remote_file import RemoteFile
from .header import Checkpoint
from .local_file import LocalFile

_THREADS = 8
"""Files that a rank samples at a time; the threads wait for a disk or a network, not for a core."""

_COMMIT = re.compile(r"/(?:snapshots|resolve)/([0-9a-f]{40})/")
"""The commit in the path of a file in the Hub's cache, or in its URL."""


View = Mapping[str, object]
"""A file as one rank sees it: its path, the values that all ranks compare, if known, and its copy."""


def _view(source: Source) -> View:
    """This rank's view of an open file after it has read the header; the copy of a file on the Hub is None."""
    view = {"path": source.name, "size": source.size, "header": source.header_hash}
    if isinstance(source, RemoteFile):
        return {**view, "commit": _commit(source.url), "etag": source.etag, "copy": None}
    assert isinstance(source, LocalFile)
    blob = Path(os.path.realpath(source.name))  # in the Hub's cache, a link to a file that the ETag names
    etag = blob.name if blob.parent.name == "blobs" else None
    return {**view, "commit": _commit(source.name), "etag": etag, "copy": source.copy}


def check_same_files(group: TensorParallelGroup, checkpoint: Checkpoint) -> int:
    """Compare the files that the ranks have opened; returns how many bytes this rank has sampled for it.

    All ranks have to call it. Nothing is sampled where the ranks read the same copies.

    Raises CheckpointError on all ranks, with the file and the rank, where two ranks have opened different ones.
    """
    views = (_view(source) if source is not None else None for source in checkpoint.opened)
    everyone = group.everywhere(lambda: (checkpoint.signature, list(views)))
    _compare(None, "list of files", dict(enumerate(signature for signature, _ in everyone)))
    by_file = zip(*(opened for _, opened in everyone), strict=True)
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

    def sample() -> dict[int, str]:
        with ThreadPoolExecutor(_THREADS, "sample", bind_thread, (group.device,)) as pool:
            return dict(zip(own, pool.map(LocalFile.sample, own.values()), strict=True))

    samples = group.gather(group.together(sample))
    for number, (file, ranks) in enumerate(zip(files, samplers, strict=True)):
        _compare(file, "content", {rank: samples[rank][number] for rank in ranks})
    return sum(source.bytes_sampled for source in own.values())


def _commit(path: str) -> str | None:
    found = _COMMIT.search(path)
    return found and found[1]


def _samplers(number: int, file: Mapping[int, View]) -> list[int]:
    """One rank for every copy of a file; none where there is one copy. Ranks of one copy take turns over the files."""
    readers: dict[object, list[int]] = {}
    for rank, view in file.items():
        if view["copy"] is not None:
            readers.setdefault(view["copy"], []).append(rank)
    return sorted(ranks[number % len(ranks)] for ranks in readers.values()) if len(readers) > 1 else []


def _compare(file: Mapping[int, View] | None, what: str, values: Mapping[int, object]) -> None:
    """Raise CheckpointError where ranks have different `values`; those that do not know theirs have None."""
    known = {rank: value for rank, value in values.items() if value is not None}
    first = min(known, default=0)
    for rank, value in known.items():
        if value != known[first]:
            where = f" ({file[rank]['path']})" if file is not None else ""
            raise agreed(
                CheckpointError(
                    f"checkpoint file {file[first]['path']}" if file is not None else "the checkpoint",
                    got=f"another {what} on rank {rank}{where} than on rank {first}",
                    expected="the same on all ranks",
                    fix="One of them is another checkpoint, or an older copy; copy or download it again.",
                )
            )
