"""Refusals of code that would compute something else with shards, and of plans that would fail or waste memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from ...plans.binding import Binding


class AllowReplicated(PlanOption):
    """Whether a plan that a transformers class declares may leave most of a model on every rank."""

    name = argument = "allow_replicated"
    order = 3


class Refusals(Feature):
    """Plans, wrappers, replaced modules, kernels, transforms and caches that do not fit shards raise on all ranks."""

    requires = ("watch",)  # whose calls, around these, tell the other ranks
    options = (AllowReplicated(),)
    model_methods = (".refusals.RefusingModel",)
    model_patches = (".refusals.UNSHARDED_MODELS_ONLY", ".refusals.UNSHARDED_MODULES_RAISE")

    def check_plan(self, bound: Binding) -> Iterable[str]:
        from .fractions import check_layers_are_sharded
        from .widths import misfits

        if not (faults := list(misfits(bound))):
            check_layers_are_sharded(bound)
        return faults


FEATURE = Refusals()
