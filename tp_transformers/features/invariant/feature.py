"""Invariant plans: results have the bits of one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plans.rules import Plan
    from ...strategies import TensorParallelLayer


class InvariantOption(PlanOption):
    """True: results have the bits of one process, on any number of ranks."""

    name = "invariant"
    order = 3
    excludes = ("sequence_parallel", "loss_parallel", "batch_sharded")
    excludes_because = "the order of its sums depends on the number of ranks"

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        from .rewrite import make_invariant

        return make_invariant(plan, model, size)


class Invariant(Feature):
    """`tp_invariant`, and the strategies that take the place of others."""

    requires = ("expert_parallel", "rewriting")
    options = (InvariantOption(),)

    def loaded(self, model: Any) -> None:
        if model.tp_resolution.keeps_order:
            from .masks import draw_full_masks

            draw_full_masks(model)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from torch.distributed.tensor import Replicate

        from . import experts, linear, norms

        return {
            "invariant_colwise": linear.InvariantColwiseParallel(),
            "invariant_colwise_rep": linear.InvariantColwiseParallel(output_layouts=Replicate()),
            "invariant_packed_colwise": linear.InvariantPackedColwiseParallel(),
            "invariant_rowwise": linear.InvariantRowwiseParallel(),
            "invariant_rowwise_rep": linear.InvariantRowwiseParallel(input_layouts=Replicate()),
            "invariant_packed_rowwise": linear.InvariantPackedRowwiseParallel(),
            "invariant_embedding": linear.InvariantEmbedding(),
            "invariant_norm": norms.InvariantNormParallel(),
            "invariant_experts": experts.InvariantExpertsParallel(),
        }


FEATURE = Invariant()
