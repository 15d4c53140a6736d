"""Expert parallelism: rewrites a plan so that each rank holds complete experts, as evenly as possible.

The rules of experts change, and all others if the plan says `alone`:

    <experts>.gate_up_proj, ...   packed_colwise, rowwise, ...   -> grouped_gemm
    <experts>                     moe_tp_experts                 -> the same; moe_all_to_all if tokens are sharded
    everything else               any                            -> the same, or replicate
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from ...anatomy import fold_layers, holds_experts, is_inside
from ...plans.rules import Plan
from ..rewriting.rewriter import Rewriter

_SUMS, _EXCHANGES = "moe_tp_experts", "moe_all_to_all"
_AROUND = (_SUMS, _EXCHANGES, "ep_dispatch_experts")


def complete_experts(plan: Plan, model: PreTrainedModel) -> Plan:
    """Rewrite `plan` so that each rank holds complete experts.

    Raises PlanError with all experts that no rank can hold complete, or if there are none.
    """
    return _ExpertRewriter(plan, model).rewrite()


class _ExpertRewriter(Rewriter):
    """State of one `complete_experts`."""

    form = "expert-parallel"

    def rewrite_rules(self) -> None:
        exchanges = self.plan.options.get("sequence_parallel") or self.plan.options.get("batch_sharded")
        experts = [name for name, module in self.modules.items() if holds_experts(module)]
        if self.plan.options["expert_parallel"] == "alone":
            for rule in list(self.rules):
                if not any(rule == name or is_inside(rule, name) for name in experts):
                    self.set(rule, "replicate")
        for name in experts:
            own = self.rules.get(name)
            inner = [rule for rule in self.rules if rule.rpartition(".")[0] == name and rule not in self.modules]
            if own is not None and own.strategy not in _AROUND:
                self.faults.append(f"{fold_layers(name)}: {own.strategy_name} is a rule for experts; they need {_SUMS}")
                continue
            for rule in inner:
                self.rules[rule] = replace(self.rules[rule], strategy="grouped_gemm", parts=None, unit=None, widths=())
            if own is not None:
                self.rules[name] = replace(own, strategy=_EXCHANGES if exchanges else _SUMS, widths=())
        if not any(name in self.rules or any(is_inside(rule, name) for rule in self.rules) for name in experts):
            self.faults.append("it has no experts with parameters (experts, out, in) that rules shard")
