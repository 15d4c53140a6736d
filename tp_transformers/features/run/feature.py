"""Ranks on this machine: `tp-transformers run`, and the start of ranks by other commands."""

from __future__ import annotations

from ...seams import Feature


class Run(Feature):
    """A script, unedited, on N ranks, with each error printed once."""

    requires = ("command_line",)
    commands = {"run": ".command"}


FEATURE = Run()
