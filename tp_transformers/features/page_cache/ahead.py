"""The first blocks of a checkpoint's files, read while the model is made: until then, the disk would do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from transformers.utils import cached_file

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

    The ranks take the blocks in turn. Nothing is read by a group on several nodes, each of which needs other bytes, nor
    by a rank with `tp_prefetch`, nor if the memory has no room for all files. An error is left to the read that needs
    the bytes.
    """
    with ExitStack() as opened, ThreadPoolExecutor(THREADS, "ahead", bind_thread, (group.device,)) as pool:
        is_one_node = len({*group.everywhere(node_name)}) == 1
        wanted = is_one_node and asked.name is not None and "tp_prefetch" not in asked.options
        paths = _paths(asked) if wanted else []
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
    """The safetensors files that transformers is about to find; none if one of them is not on this machine."""
    given = {name: asked.arguments[name] for name in ("cache_dir", "revision", "subfolder") if name in asked.arguments}
    find = partial(cached_file, asked.name, local_files_only=True, **given)
    variant = asked.arguments.get("variant")
    try:
        return [find(with_variant("model.safetensors", variant))]
    except OSError:
        pass
    try:
        weight_map, _ = read_index(find(with_variant("model.safetensors.index.json", variant)))
        return [find(name) for name in sorted({*weight_map.values()})]
    except (OSError, CheckpointError):  # other files, or an index of which transformers is about to tell
        return []
