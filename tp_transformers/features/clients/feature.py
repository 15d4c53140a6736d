"""Clients: `pipeline(..., tp_plan="auto")`, and lm_eval's `--model_args tp_plan=auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Clients(Feature):
    """Code that calls `from_pretrained` for a user, and is given a plan to pass on."""

    def clients(self) -> Sequence[Patch]:
        from .harness import HARNESS
        from .pipelines import PIPELINE

        return (PIPELINE, HARNESS)


FEATURE = Clients()
