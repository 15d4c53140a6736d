"""Clients: `pipeline(..., tp_plan="auto")`, lm_eval's `--model_args tp_plan=auto`, and saves of accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Clients(Feature):
    """Code that loads a model for a user, and is given a plan to pass on, or that saves one."""

    def clients(self) -> Sequence[Patch]:
        from .pipelines import HARNESS, PIPELINE

        return (PIPELINE, HARNESS)

    def model_patches(self) -> Sequence[Patch]:
        from .accelerate_saves import ACCELERATOR

        return (ACCELERATOR,)


FEATURE = Clients()
