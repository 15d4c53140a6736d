"""Invariant plans: results have the bits of one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...seams import Feature, Loaded, Option, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...loading.options import Options
    from ...plans.rules import Plan
    from ...ranks.group import TensorParallelGroup
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

    requires = ("rewriting",)

    def options(self) -> Sequence[Option]:
        return (InvariantOption(),)

    @contextmanager
    def around_load(self, group: TensorParallelGroup, options: Options) -> Iterator[Loaded]:
        def draw(model: Any) -> None:
            if model.tp_resolution.keeps_order:
                from .masks import draw_full_masks

                draw_full_masks(model, group)

        yield draw

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from torch.distributed.tensor import Replicate

        from .experts import InvariantExpertsParallel
        from .linear import (
            InvariantColwiseParallel,
            InvariantEmbedding,
            InvariantPackedColwiseParallel,
            InvariantPackedRowwiseParallel,
            InvariantRowwiseParallel,
        )
        from .norms import InvariantNormParallel

        return {
            "invariant_colwise": InvariantColwiseParallel(),
            "invariant_colwise_rep": InvariantColwiseParallel(output_layouts=Replicate()),
            "invariant_packed_colwise": InvariantPackedColwiseParallel(),
            "invariant_rowwise": InvariantRowwiseParallel(),
            "invariant_rowwise_rep": InvariantRowwiseParallel(input_layouts=Replicate()),
            "invariant_packed_rowwise": InvariantPackedRowwiseParallel(),
            "invariant_embedding": InvariantEmbedding(),
            "invariant_norm": InvariantNormParallel(),
            "invariant_experts": InvariantExpertsParallel(),
        }


FEATURE = Invariant()
