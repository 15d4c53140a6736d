"""Pre-sharded checkpoints: `save_sharded(model, folder)`, read back by `from_pretrained(folder, tp_plan="auto")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class PreSharded(Feature):
    """One file for each rank, which that rank reads from its first byte to its last."""

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import RankFiles

        return (RankFiles,)


FEATURE = PreSharded()
