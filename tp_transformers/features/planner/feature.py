"""Planning of loads: `tp-transformers plan` and `tp-transformers plans`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ...seams import Feature


class Planner(Feature):
    """The memory of every rank before a load, and the list of architectures with plans."""

    requires = ("command_line", "mixers", "mtp", "packed", "quantized")

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command, plans

        return {"plan": command, "plans": plans}


FEATURE = Planner()
