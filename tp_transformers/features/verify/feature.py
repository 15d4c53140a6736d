"""Verification of plans: `tp-transformers verify` and `tp_transformers.verify`."""

from __future__ import annotations

from ...seams import Feature


class Verify(Feature):
    """A small random model on several ranks, compared with one process."""

    requires = ("command_line", "quantized", "run")
    commands = {"verify": ".command"}


FEATURE = Verify()
