"""Refusals of code that would compute something else with shards, and of plans that would fail or waste memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...seams import Feature, Option, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...patches import Patch
    from ...plans.binding import Binding
    from ...plans.rules import Plan


class AllowReplicated(PlanOption):
    """Whether a plan that a transformers class declares may leave most of a model on every rank."""

    name = argument = "allow_replicated"
    order = 3

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        return plan


class Refusals(Feature):
    """Plans, wrappers, replaced modules, kernels, transforms and caches that do not fit shards raise on all ranks."""

    requires = ("watch",)  # whose calls, around these, tell the other ranks

    def options(self) -> Sequence[Option]:
        return (AllowReplicated(),)

    def check_plan(self, bound: Binding) -> Iterable[str]:
        from .fractions import check_layers_are_sharded
        from .widths import misfits

        if not (faults := list(misfits(bound))):
            check_layers_are_sharded(bound)
        return faults

    def model_methods(self) -> Sequence[type]:
        from .refusals import RefusingModel

        return (RefusingModel,)

    def model_patches(self) -> Sequence[Patch]:
        from .refusals import UNSHARDED_MODELS_ONLY, UNSHARDED_MODULES_RAISE

        return (UNSHARDED_MODELS_ONLY, UNSHARDED_MODULES_RAISE)


FEATURE = Refusals()
