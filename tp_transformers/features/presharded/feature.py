"""Pre-sharded checkpoints: `save_sharded(model, folder)`, read back by a load; `tp-transformers shard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class PreSharded(Feature):
    """One file for each rank, which that rank reads from its first byte to its last."""

    requires = ("command_line", "packed")
    public: ClassVar[Mapping[str, str]] = {"save_sharded": ".save", "checkpoint.verify_sharded": ".checkpoint"}

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"shard": command}

    def storages(self) -> Sequence[type[Storage]]:
        from .checkpoint import RankFiles

        return (RankFiles,)

    def check_save(self, folder: Path, variant: str | None) -> None:
        from .manifest import check_ordinary_save

        check_ordinary_save(folder, variant)


FEATURE = PreSharded()
