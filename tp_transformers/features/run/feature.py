"""Ranks on this machine: `tp-transformers run`, and the start of ranks by other commands."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ...seams import Feature


class Run(Feature):
    """A script, unedited, on N ranks, with each error printed once."""

    requires = ("command_line",)

    def commands(self) -> Mapping[str, ModuleType]:
        from . import command

        return {"run": command}


FEATURE = Run()
