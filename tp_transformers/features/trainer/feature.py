"""transformers' Trainer, for models that are loaded with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Training(Feature):
    """Trainer trains, logs, evaluates and saves as in one process, and counts copies of a model, not ranks."""

    requires = ("dcp", "debug", "full_parameters", "machines")

    def clients(self) -> Sequence[Patch]:
        from .patch import TRAINER

        return (TRAINER,)

    model_patches = clients


FEATURE = Training()
