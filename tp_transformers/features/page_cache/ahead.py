"""The first blocks of a checkpoint's files, read while models are imported and made, so that the disk has work then.

So this module imports no models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ...checkpoint.reading.local_file import LocalFile
from ...errors import CheckpointError
from ...ranks.environment import launcher, local_rank, local_size
from ...ranks.limits import available_memory
from .prefetch import BLOCK_BYTES, THREADS, Block, fetch

_reads: ContextVar[list[Future[None]] | None] = ContextVar("tp_transformers_ahead", default=None)
"""Reads ahead of this rank's running load."""


@contextmanager
def reading_ahead(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Read the files of a checkpoint into the page cache until `stop`, or until the block ends.

    `args` and `kwargs`: those of `from_pretrained`. The ranks of a node take the blocks in turn. Nothing is read if a
    launcher has started ranks on several nodes, each of which needs other bytes, nor with `tp_prefetch`, nor if the
    memory has no room for all files. An error is left to the read that needs the bytes.
    """
    rank, size = _turn()
    with ExitStack() as opened, ThreadPoolExecutor(THREADS, "ahead") as pool:
        paths = _paths(args, kwargs) if size and kwargs.get("tp_prefetch") is None else []
        try:
            blocks = _missing_blocks([opened.enter_context(closing(LocalFile(path))) for path in paths])
        except CheckpointError:
            blocks = []
        token = _reads.set([pool.submit(fetch, *block) for block in blocks[rank :: size or 1]])
        try:
            yield
        finally:
            stop()
            _reads.reset(token)


def stop() -> None:
    """Begin no more reads ahead of the running load."""
    for read in _reads.get() or ():
        read.cancel()


def _turn() -> tuple[int, int]:
    """The rank of this process on its node, and the number of ranks there; 0 ranks if there are several nodes."""
    current = launcher()
    if current is None:
        return 0, 1
    size = int(os.environ[current.size])
    return (local_rank(int(os.environ[current.rank])) or 0, size) if local_size() == size else (0, 0)


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


def _paths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The safetensors files that transformers is about to find; none if one of them is not on this machine."""
    if kwargs.get("gguf_file") or kwargs.get("force_download") or kwargs.get("use_safetensors") is False:
        return []
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    given = {argument: kwargs[argument] for argument in ("cache_dir", "revision", "subfolder") if argument in kwargs}
    find = partial(cached_file, name, local_files_only=True, **given)
    variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
    try:
        return [find(f"model{variant}.safetensors")]
    except (OSError, TypeError, ValueError):  # other files, or no name
        pass
    try:
        index = Path(find(f"model.safetensors.index{variant}.json"))
        return [find(file) for file in sorted({*json.loads(index.read_bytes())["weight_map"].values()})]
    except (OSError, TypeError, ValueError, LookupError, AttributeError):  # of which transformers is about to tell
        return []
