"""Another number of ranks for a loaded model: `reshard(model, 3)`; `tp-transformers reshard-plan`."""

from __future__ import annotations

from typing import Any

from ...seams import Feature


class Reshard(Feature):
    """A model that is loaded on n ranks becomes one on m ranks, in the same processes."""

    requires = ("command_line", "planner", "shares")
    public = {"reshard": ".reshard", "training.reshard": ".training"}
    commands = {"reshard-plan": ".command"}
    storages = (".storage.HeldByRanks",)

    def loaded(self, model: Any) -> None:
        from .loaded import remember

        remember(model)


FEATURE = Reshard()
