"""Expert parallelism: each rank holds complete experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    requires = ("rewriting", "sequence")
    public = {"training.ExpertLoad": ".expert_load"}
    options = (ExpertOption(),)
    clients = (".patch.EP_IMPLEMENTATION",)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .exchange import SequenceExpertsParallel

        return {"moe_all_to_all": SequenceExpertsParallel()}


FEATURE = ExpertParallelism()
