"""The patch of transformers' Trainer, which is imported late: it takes a second."""

from __future__ import annotations

from importlib import import_module

from ..patches import Patch, Undo, when_imported


def _change_methods() -> Undo:
    undo: Undo = import_module(f"{__package__}.trainer_methods").change_methods()
    return undo


TRAINER = Patch("transformers", "methods of Trainer", lambda: when_imported("transformers.trainer", _change_methods))
"""Held by `enable()`, by every model that is loaded with a plan, and by our own `Trainer`."""
