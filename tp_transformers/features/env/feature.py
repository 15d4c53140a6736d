"""Report of an installation: `tp-transformers env`."""

from __future__ import annotations

from ...seams import Feature


class Env(Feature):
    """What a report of a problem begins with."""

    requires = ("shared_memory",)
    commands = {"env": ".command"}


FEATURE = Env()
