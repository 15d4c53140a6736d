"""Refusals of code that would compute something else with a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Refusals(Feature):
    """Wrappers, replaced modules, kernels, transforms and caches that do not fit shards raise on all ranks."""

    def model_methods(self) -> Sequence[type]:
        from .refusals import RefusingModel

        return (RefusingModel,)

    def model_patches(self) -> Sequence[Patch]:
        from .refusals import UNSHARDED_MODELS_ONLY, UNSHARDED_MODULES_RAISE

        return (UNSHARDED_MODELS_ONLY, UNSHARDED_MODULES_RAISE)


FEATURE = Refusals()
