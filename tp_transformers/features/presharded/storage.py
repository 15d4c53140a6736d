"""Pre-sharded checkpoints: files that `save_sharded` wrote, one for each rank, read on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.conversion.convert import identity
from ...checkpoint.reading.header import Checkpoint
from ...loading.storage import Asked, Storage
from ...slices.stored import Source
from ...transformers_api import LoadStateDictConfig
from .checkpoint import ShardedCheckpoint
from .manifest import VARIANT, Manifest, refuse_without_plan


class RankFiles(Storage):
    """The rank files of one manifest; a rank opens those that it reads."""

    has_own_names = True

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.shares = manifest.shares

    @classmethod
    def find(cls, asked: Asked) -> Storage | None:
        if asked.folder is None or asked.arguments.get("variant") not in (None, VARIANT):
            return None
        manifest = Manifest.find(asked.folder)
        if manifest is None:
            return None
        asked.arguments["variant"] = VARIANT
        return cls(manifest)

    @classmethod
    def check_unplanned(cls, asked: Asked) -> None:
        if asked.folder is not None and asked.arguments.get("variant") in (None, VARIANT):
            refuse_without_plan(asked.folder)

    def open(self, files: Sequence[str | Source], config: LoadStateDictConfig, *, rank: int) -> Checkpoint:
        return ShardedCheckpoint(self.manifest, rank=rank)

    def applied(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Conversions of the load before the model was saved in shards; `save_pretrained` reverts them."""
        return [entry for entry in entries if identity(entry) in self.manifest.conversions]

    def origin(self, name: str, files: Sequence[str]) -> Mapping[str, Any]:
        return self.manifest.source
