"""Expert parallelism: each rank holds complete experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...seams import Feature, Option, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...patches import Patch
    from ...plans.rules import Plan
    from ...strategies import TensorParallelLayer


class ExpertOption(PlanOption):
    """True: each rank holds complete experts."""

    name = "expert_parallel"
    expected = 'True, "alone", False or None'
    order = 0

    def fits(self, value: Any) -> bool:
        return super().fits(value) or value == "alone"

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        from .rewrite import complete_experts

        return complete_experts(plan, model)


class ExpertParallelism(Feature):
    """`tp_expert_parallel`, and experts that exchange tokens."""

    requires: ClassVar[tuple[str, ...]] = ("rewriting", "sequence")
    public: ClassVar[Mapping[str, str]] = {"training.ExpertLoad": ".expert_load"}

    def options(self) -> Sequence[Option]:
        return (ExpertOption(),)

    def clients(self) -> Sequence[Patch]:
        from .patch import EP_IMPLEMENTATION

        return (EP_IMPLEMENTATION,)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .exchange import SequenceExpertsParallel

        return {"moe_all_to_all": SequenceExpertsParallel()}


FEATURE = ExpertParallelism()
