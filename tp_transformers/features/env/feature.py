"""Report of an installation: `tp-transformers env`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ...seams import Feature


class Env(Feature):
    """What a report of a problem begins with."""

    requires = ("shared_memory",)

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"env": command}


FEATURE = Env()
