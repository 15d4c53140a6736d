"""Loss parallelism: the loss of logits that stay sharded along the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...seams import RAISES, Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plans.rules import Plan
    from ...strategies import TensorParallelLayer


class LossOption(PlanOption):
    """True: logits stay sharded if there are labels."""

    name = "loss_parallel"
    order = 2

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        from .rewrite import shard_loss

        return shard_loss(plan, model)


class LossParallelism(Feature):
    """`tp_loss_parallel`, its strategies, and `tp_transformers.strategies.vocab_parallel_cross_entropy`."""

    public = {"strategies.vocab_parallel_cross_entropy": ".cross_entropy"}
    torch_names = {"torch._assert_async": RAISES}  # the loss refuses labels that are no token
    options = (LossOption(),)

    def strategies(self) -> Mapping[str, TensorParallelLayer]:
        from .cross_entropy import LossColwiseParallel, LossParallel

        return {"colwise_loss": LossColwiseParallel(), "loss_parallel": LossParallel()}


FEATURE = LossParallelism()
