"""Chunks of tensors in one file a rank, which transformers' `save_pretrained(distributed_checkpoint=True)` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...checkpoint.reading.chunks import ChunkedCheckpoint, chunk_files
from ...loading.storage import Asked, Storage
from ...ranks.group import TensorParallelGroup


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

    def files(
        self, original: Callable[..., Any], arguments: Mapping[str, Any], group: TensorParallelGroup
    ) -> tuple[Sequence[str] | None, Mapping[str, Any] | None]:
        return self.found, None
