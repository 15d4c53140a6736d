"""Expert parallelism: each rank holds complete experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plans.binding import Binding
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
    """`tp_expert_parallel`, complete experts, and experts that exchange tokens."""

    requires = ("rewriting", "sequence")
    public = {"strategies.IsolatedParallel": ".complete", "training.ExpertLoad": ".expert_load"}
    options = (ExpertOption(),)
    clients = (".patch.EP_IMPLEMENTATION",)

    def check_plan(self, bound: Binding) -> Iterable[str]:
        from .exchange import divided_experts

        return divided_experts(bound) if bound.size > 1 else ()

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .complete import CompleteExpertsParallel, IsolatedParallel
        from .exchange import SequenceExpertsParallel

        return {
            "local": IsolatedParallel(),
            "moe_tp_experts": CompleteExpertsParallel(),  # in place of the core's, for experts that are sharded
            "moe_all_to_all": SequenceExpertsParallel(),
            # Names in the plans of transformers 5 for expert parallelism.
            "ep_dispatch_experts": CompleteExpertsParallel(),
            "grouped_gemm": IsolatedParallel(use_dtensor=True),
        }


FEATURE = ExpertParallelism()
