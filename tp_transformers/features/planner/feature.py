"""Planning of loads: `tp-transformers plan` and `tp-transformers plans`."""

from __future__ import annotations

from ...seams import Feature


class Planner(Feature):
    """The memory of every rank before a load, and the list of architectures with plans."""

    requires = ("command_line", "cpu_decode", "mixers", "mtp", "packed", "quantized")
    commands = {"plan": ".command", "plans": ".plans"}


FEATURE = Planner()
