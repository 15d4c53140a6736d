"""Another number of ranks for a loaded model: `reshard(model, 3)`; `tp-transformers reshard-plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ...seams import Feature, Loaded

if TYPE_CHECKING:
    from ...loading.options import Options
    from ...loading.storage import Storage
    from ...ranks.group import TensorParallelGroup


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

    def around_load(self, group: TensorParallelGroup, options: Options) -> AbstractContextManager[Loaded]:
        from .loaded import remember

        return nullcontext(remember)


FEATURE = Reshard()
