"""Verification of plans: `tp-transformers verify` and `tp_transformers.verify`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ...seams import Feature


class Verify(Feature):
    """A small random model on several ranks, compared with one process."""

    requires = ("command_line", "quantized", "run")

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"verify": command}


FEATURE = Verify()
