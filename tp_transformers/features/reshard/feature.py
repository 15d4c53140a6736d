"""Another number of ranks for a loaded model: `reshard(model, 3)`; `tp-transformers reshard-plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Storage


class Reshard(Feature):
    """A model that is loaded on n ranks becomes one on m ranks, in the same processes."""

    requires = ("command_line", "planner")
    public: ClassVar[Mapping[str, str]] = {"reshard": ".reshard", "training.reshard": ".training"}

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"reshard-plan": command}

    def storages(self) -> Sequence[type[Storage]]:
        from .storage import HeldByRanks

        return (HeldByRanks,)

    def loaded(self, model: Any) -> None:
        from .loaded import remember

        remember(model)


FEATURE = Reshard()
