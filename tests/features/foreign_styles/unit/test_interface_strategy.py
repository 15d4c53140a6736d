"""Strategies in the form of transformers from 5.16 on, which shard by `shard_param`: refused with the remedy."""

from typing import Any

import pytest

from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.strategies import ParallelInterface, TensorParallelLayer

interface = pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="the interface is of transformers 5.16 and later"
)


class Theirs(interface.TensorParallelLayer):
    def shard_param(self, module: Any, param: Any, mesh: Any) -> None: ...


class Forwards(interface.TensorParallelLayer):
    def install_forward(self, module: Any, mesh: Any) -> None: ...


class Ours(TensorParallelLayer):
    def shard_param(self, module: Any, param: Any, mesh: Any) -> None: ...


@pytest.mark.parametrize(
    "style", [Theirs(), Forwards(), Ours(), interface.ColwiseParallel()], ids=lambda style: type(style).__name__
)
def test_a_strategy_that_shards_by_shard_param_is_refused(style) -> None:
    said = "shard_param, which nothing calls here.*Inherit from tp_transformers.strategies.TensorParallelLayer"
    with pytest.raises(PlanError, match=said):
        Plan.from_dict({"mlp.gate_proj": style}, source="a plan")
    with pytest.raises(PlanError, match=said):
        ParallelInterface.register_strategy("mine", style)


def test_so_is_one_that_is_registered_with_transformers() -> None:
    interface.ParallelInterface.register("mine", Theirs())
    try:
        with pytest.raises(PlanError, match="shard_param, which nothing calls here"):
            _ = Plan.from_dict({"mlp.gate_proj": "mine"}, source="a plan").rules[0].instance
    finally:
        del interface.ParallelInterface._global_mapping["mine"]
