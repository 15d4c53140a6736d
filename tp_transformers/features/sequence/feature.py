"""Sequence parallelism: between blocks, activations are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plans.binding import Binding
    from ...plans.rules import Plan
    from ...strategies import TensorParallelLayer


class SequenceOption(PlanOption):
    """True: activations are sharded along the sequence between blocks."""

    name = "sequence_parallel"
    order = 1

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        from .rewrite import shard_sequence

        return shard_sequence(plan, model)


class SequenceParallelism(Feature):
    """`tp_sequence_parallel`, its strategies, and `tp_transformers.strategies.SequenceParallel`."""

    public = {"strategies.SequenceParallel": ".sequence"}
    requires = ("rewriting",)
    torch_names = {
        "torch.nn.modules.module._global_backward_hooks": "no warning of them",
        "torch.nn.modules.module._global_backward_pre_hooks": "no warning of them",
        "torch.nn.modules.module._global_forward_hooks": "no warning of them",
        "torch.nn.modules.module._global_forward_pre_hooks": "no warning of them",
    }
    options = (SequenceOption(),)

    def check_plan(self, bound: Binding) -> Iterable[str]:
        from .checks import full_inputs

        return full_inputs(bound) if bound.size > 1 else ()

    def loaded(self, model: Any) -> None:
        if model.tp_group.size > 1:
            from .randomness import draw_between_blocks

            draw_between_blocks(model)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from . import sequence

        return {
            "sequence_scatter": sequence.SequenceScatterParallel(),
            "sequence_parallel": sequence.SequenceParallel(),
            "sequence_parallel_rep": sequence.SequenceParallelRep(),
            "sequence_gather": sequence.SequenceGatherParallel(),
            "sequence_whole": sequence.SequenceReplicatedParallel(),
            "sequence_states": sequence.SequenceStatesParallel(),
        }


FEATURE = SequenceParallelism()
