"""Batch sharding: ranks have batches of their own, which sharded modules gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...seams import Feature, PlanOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...plans.rules import Plan


class BatchOption(PlanOption):
    """True: attention, MLPs and experts gather the samples of all ranks; or a list of the modules that gather them."""

    name = "batch_sharded"
    expected = 'True, False or None, "experts", or a list of modules'
    order = 1
    excludes = ("sequence_parallel", "loss_parallel")
    excludes_because = "norms and losses are of a rank's own samples already"

    def fits(self, value: Any) -> bool:
        from ...plans.parse import is_names

        return super().fits(value) or value == "experts" or is_names(value)

    def rewrite(self, plan: Plan, model: PreTrainedModel, size: int) -> Plan:
        from .rewrite import shard_batch

        return shard_batch(plan, model)


class BatchSharding(Feature):
    """`tp_batch_sharded`."""

    requires = ("expert_parallel", "sequence")
    options = (BatchOption(),)
    model_methods = (".batch.BatchModel",)

    def loaded(self, model: Any) -> None:
        from ...strategies import block_of
        from ...strategies.signature import BATCH, REPLICATED

        for name, strategy in model.tp_resolution.module_strategies.items():
            takes, inside = strategy.signature.takes, strategy.signature.inside
            if takes is BATCH and inside == (REPLICATED, REPLICATED) and model.tp_group.device_mesh is not None:
                from .batch_blocks import SharedRandomness

                block_of(model.get_submodule(name)).guards.append(SharedRandomness(model.tp_group))


FEATURE = BatchSharding()
