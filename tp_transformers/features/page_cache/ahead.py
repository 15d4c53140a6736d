"""The first blocks of a checkpoint's files, read while the model is made: until then, the disk would do nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache

from ...checkpoint.reading.header import read_index, with_variant
from ...checkpoint.reading.local_file import LocalFile
from ...errors import CheckpointError
from ...ranks.environment import node_name
from ...ranks.group import TensorParallelGroup, bind_thread
from ...ranks.limits import available_memory
from .prefetch import BLOCK_BYTES, THREADS, Block, fetch

if TYPE_CHECKING:
    from ...loading.storage import Asked

_reads: ContextVar[list[Future[None]] | None] = ContextVar("tp_transformers_ahead", default=None)
"""Reads ahead of this rank's running load."""


@contextmanager
def reading_ahead(asked: Asked, group: TensorParallelGroup) -> Iterator[None]:
    """Read the files of the checkpoint into the page cache until `stop`, or until the block ends. Collective.

    The ranks take the blocks in turn; a group on several nodes, of which each needs other bytes, reads nothing. Nor is
    anything read if the memory has no room for all files. An error is left to the read that needs the bytes.
    """
    with ExitStack() as opened, ThreadPoolExecutor(THREADS, "ahead", bind_thread, (group.device,)) as pool:
        paths = _paths(asked) if len({*group.everywhere(node_name)}) == 1 else []
        files = [opened.enter_context(closing(LocalFile(path))) for path in paths]
        blocks = _missing_blocks(files)[group.rank :: group.size]
        token = _reads.set([pool.submit(fetch, *block) for block in blocks])
        try:
            yield
        finally:
            stop()
            _reads.reset(token)


def stop() -> None:
    """Begin no more reads ahead of the running load."""
    for read in _reads.get() or ():
        read.cancel()


def _missing_blocks(files: Sequence[LocalFile]) -> list[Block]:
    """The blocks of the files that are not in the page cache, as the first byte of each block tells."""
    if not files or sum(file.size for file in files) > available_memory():
        return []
    fetch(files[0], 0, 1)
    if not files[0].is_resident([(0, 1)]):
        return []  # the file system does not tell
    blocks = []
    for file in files:
        starts = range(0, file.size, BLOCK_BYTES)
        if not file.is_resident((start, start + 1) for start in starts):
            blocks += [(file, start, min(start + BLOCK_BYTES, file.size)) for start in starts]
    return blocks


def _paths(asked: Asked) -> list[str]:
    """The safetensors files that transformers is about to find, if all are on this machine; else none."""
    variant = asked.arguments.get("variant")
    try:
        index = _find(asked, with_variant("model.safetensors.index.json", variant))
        names = read_index(index)[0].values() if index else [with_variant("model.safetensors", variant)]
        paths = [_find(asked, name) for name in sorted({*names})]
    except (CheckpointError, ValueError):  # transformers is about to say so
        return []
    return [path for path in paths if path] if all(paths) else []


def _find(asked: Asked, name: str) -> str:
    """The path of one file in the folder of the checkpoint, or in the cache of the Hub; "" if it is not there."""
    if asked.name is None:
        return ""
    if os.path.isdir(asked.name):
        path = os.path.join(asked.folder or "", name)
        return path if os.path.isfile(path) else ""
    given = {argument: asked.arguments.get(argument) for argument in ("cache_dir", "revision")}
    found = try_to_load_from_cache(str(asked.name), os.path.join(asked.arguments.get("subfolder") or "", name), **given)
    return found if isinstance(found, str) else ""
