"""Chunks of tensors in one file a rank, as transformers' `save_pretrained(distributed_checkpoint=True)` writes them.

torch.distributed.checkpoint writes these safetensors files; the metadata of each has the offsets of its chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.reading.header import Checkpoint, read_header
from ...errors import CheckpointError
from ...loading.storage import Asked, Found, Storage
from ...ranks.group import TensorParallelGroup
from ...slices.composed import concat
from ...slices.lazy import LazyTensor
from ...slices.stored import Source

Chunk = tuple[tuple[int, ...], LazyTensor]
"""The offsets of a chunk in the full tensor, and the chunk."""

_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_FIX = "Copy the files of all ranks into the folder, or save the model again."


class ChunkedCheckpoint(Checkpoint):
    """Open files that hold chunks of tensors; a tensor is the lazy concatenation of its chunks."""

    def __init__(self, files: Iterable[Any], **index: Any) -> None:
        """Open `files` as `Checkpoint` does. Raises CheckpointError if a chunk is missing, too."""
        self._chunks: dict[str, list[Chunk]] = {}
        super().__init__(files, **index)
        try:
            self.tensors.update((name, joined_chunks(name, chunks)) for name, chunks in self._chunks.items())
        except CheckpointError:
            self.close()
            raise

    def read(self, source: Source) -> Mapping[str, LazyTensor]:
        """The full tensors of a file: none, if it holds chunks."""
        tensors, offsets = read_header(source), offsets_in(source)
        if offsets is None:
            return tensors
        for name, tensor in tensors.items():
            self._chunks.setdefault(name, []).append((offsets.get(name, ()), tensor))
        return {}


class ChunkFiles(Storage):
    """The files of all ranks of a save, in one folder."""

    has_own_names = True
    checkpoint = ChunkedCheckpoint

    def __init__(self, found: Sequence[str]) -> None:
        self.found = found

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        arguments = asked.arguments
        if asked.folder is None or any(arguments.get(name) for name in ("variant", "state_dict", "gguf_file")):
            return None
        files = chunk_files(asked.folder)
        return cls(files) if files else None

    def files(self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup) -> Found:
        return self.found, None


def chunk_files(folder: Path) -> list[str]:
    """Return the paths of the files with chunks in `folder`; none if it holds another checkpoint."""
    return sorted(str(path) for path in folder.glob("shard-*.safetensors") if _FILE.fullmatch(path.name))


def offsets_in(source: Source) -> dict[str, tuple[int, ...]] | None:
    """Return the offsets of each chunk in a file, by name; None for a file of full tensors.

    Raises CheckpointError on malformed metadata.
    """
    text = source.metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return None
    try:
        return {name: tuple(map(int, entry["saved_offsets"])) for name, entry in json.loads(text).items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise source.fault("offsets of chunks that cannot be read", "saved_offsets of every tensor", _FIX) from None


def joined_chunks(name: str, chunks: Sequence[Chunk], dim: int = 0) -> LazyTensor:
    """Join chunks that are a grid, from dim `dim` on. Raises CheckpointError if a chunk is missing."""
    if dim == chunks[0][1].ndim:
        return chunks[0][1]
    by_start: dict[int, list[Chunk]] = {}
    for offsets, chunk in chunks:
        by_start.setdefault(offsets[dim] if len(offsets) > dim else 0, []).append((offsets, chunk))
    parts, position = [], 0
    for start, of_start in sorted(by_start.items()):
        if start != position or len({chunk.shape[dim] for _, chunk in of_start}) > 1:
            got = f"chunks from {sorted(by_start)} along dim {dim}, of which one should begin at {position}"
            raise CheckpointError(f"tensor {name}", got=got, expected="chunks of the full tensor", fix=_FIX)
        position += of_start[0][1].shape[dim]
        parts.append(joined_chunks(name, of_start, dim + 1))
    try:
        return concat(parts, dim)
    except ValueError as error:
        raise CheckpointError(f"tensor {name}", got=str(error), expected="chunks of one tensor", fix=_FIX) from None
