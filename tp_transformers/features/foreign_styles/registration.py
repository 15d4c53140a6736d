"""The documented name of `register` of transformers' `ParallelInterface`: `register_strategy`."""

from __future__ import annotations

from ...patches import Patch, Undo, nothing
from ...transformers_api import parallel_styles


def _name_registration() -> Undo:
    interface = type(parallel_styles())
    if hasattr(interface, "register_strategy"):
        return lambda: None
    interface.register_strategy = interface.register
    return lambda: delattr(interface, "register_strategy")


REGISTRATION = Patch("transformers", "register_strategy", _name_registration, without=nothing)
