"""Pre-sharded checkpoints: `save_sharded(model, folder)`, read back by a load; `tp-transformers shard`."""

from __future__ import annotations

from pathlib import Path

from ...seams import Feature


class PreSharded(Feature):
    """One file for each rank, which that rank reads from its first byte to its last."""

    requires = ("command_line", "packed")
    public = {"save_sharded": ".save", "checkpoint.verify_sharded": ".checkpoint"}
    commands = {"shard": ".command"}
    storages = (".checkpoint.RankFiles",)

    def check_save(self, folder: Path, variant: str | None) -> None:
        from .manifest import check_ordinary_save

        check_ordinary_save(folder, variant)


FEATURE = PreSharded()
