"""Sequence parallelism: between blocks, activations are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from ...seams import Feature, Loaded, Option, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...loading.options import Options
    from ...plans.rules import Plan
    from ...ranks.group import TensorParallelGroup
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

    public: ClassVar[Mapping[str, str]] = {"strategies.SequenceParallel": ".sequence"}
    requires = ("rewriting",)
    torch_names: ClassVar[Mapping[str, str]] = {
        "torch.nn.modules.module._global_backward_hooks": "no warning of them",
        "torch.nn.modules.module._global_backward_pre_hooks": "no warning of them",
        "torch.nn.modules.module._global_forward_hooks": "no warning of them",
        "torch.nn.modules.module._global_forward_pre_hooks": "no warning of them",
    }

    def options(self) -> Sequence[Option]:
        return (SequenceOption(),)

    def around_load(self, group: TensorParallelGroup, options: Options) -> AbstractContextManager[Loaded]:
        def draw(model: Any) -> None:
            strategies = model.tp_resolution.module_strategies
            if group.size > 1 and any(strategy.signature.gathers_sequence for strategy in strategies.values()):
                from .randomness import draw_between_blocks

                draw_between_blocks(model)

        return nullcontext(draw)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .sequence import (
            SequenceGatherParallel,
            SequenceParallel,
            SequenceParallelRep,
            SequenceReplicatedParallel,
            SequenceScatterParallel,
            SequenceStatesParallel,
        )

        return {
            "sequence_scatter": SequenceScatterParallel(),
            "sequence_parallel": SequenceParallel(),
            "sequence_parallel_rep": SequenceParallelRep(),
            "sequence_gather": SequenceGatherParallel(),
            "sequence_whole": SequenceReplicatedParallel(),
            "sequence_states": SequenceStatesParallel(),
        }


FEATURE = SequenceParallelism()
