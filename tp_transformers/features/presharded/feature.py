"""Pre-sharded checkpoints: `save_sharded(model, folder)`, read back by a load; `tp-transformers shard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class PreSharded(Feature):
    """One file for each rank, which that rank reads from its first byte to its last."""

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"shard": command}

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import RankFiles

        return (RankFiles,)


FEATURE = PreSharded()
