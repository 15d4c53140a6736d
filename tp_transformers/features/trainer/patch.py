"""Patch of transformers' Trainer. It is imported late, since that takes a second."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ...marks import untyped
from ...patches import Patch, Undo, replace

_MODULE = "transformers.trainer"


def _change_methods() -> Undo:
    undo: Undo = import_module(f"{__package__}.methods").change_methods()
    return undo


def _refuse(original: Any, self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    """Replace `Trainer.__init__` if the methods cannot be replaced: raise for tensor-parallel models."""
    from ...model.parallelize import is_tensor_parallel

    if is_tensor_parallel(model):
        TRAINER.refuse()
    original(self, model, *args, **kwargs)
    if is_tensor_parallel(self.model):  # from `model_init`
        TRAINER.refuse()


TRAINER = Patch(
    "transformers",
    "Trainer",
    _change_methods,
    module=_MODULE,
    without=lambda: replace(untyped(sys.modules[_MODULE]).Trainer, "__init__", _refuse),
)
"""Held by `enable()`, by every model that is loaded with a plan, and by our own `Trainer`."""
