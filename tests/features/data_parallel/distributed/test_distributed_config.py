"""transformers' `DistributedConfig` after `enable()`: tensor parallelism alone, or with data-parallel copies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.comparisons import full_gradients, relative, relative_errors
from tests.support.models import PROMPTS, load, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.pool import WorkerError

DistributedConfig = pytest.importorskip("transformers.distributed.configuration_utils").DistributedConfig
if not hasattr(DistributedConfig(), "tp_size"):
    pytest.skip("this release's DistributedConfig has no tp_size", allow_module_level=True)

TOLERANCE = 1e-4  # fp32 sums in another order
SIZES = ("fsdp_size", "dp_replicate_size")
"""Fields of the number of copies; releases have both or one."""


MLP = {
    "model.layers.*.mlp.gate_proj": "colwise_rep",
    "model.layers.*.mlp.up_proj": "colwise_rep",
    "model.layers.*.mlp.down_proj": "rowwise_rep",
}


@pytest.mark.parametrize(
    ("fields", "gate"),
    [({"tp_size": 2}, "colwise"), ({"tp_plan": "auto"}, "colwise"), ({"tp_size": 2, "tp_plan": MLP}, "colwise_rep")],
)
@on_ranks()
def test_tensor_parallelism_alone_is_ours(folder, fields, gate) -> None:
    model = load(folder, tp_plan=None, distributed_config=DistributedConfig(**fields))
    assert relative(logits_of(model), logits_of(AutoModelForCausalLM.from_pretrained(folder))) < TOLERANCE
    assert model.tp_plan["model.layers.*.mlp.gate_proj"] == gate
    assert getattr(model, "fsdp_size", 1) == 1
    assert model.tp_size == 2


def gradients_on_mesh(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Run on every rank: gradients of the mean of the copies' losses, of a prompt each."""
    model = load(folder, tp_plan=None, distributed_config=DistributedConfig(tp_size=2, **fields)).train()
    if hasattr(model, "fsdp_size"):  # not in older releases
        assert model.fsdp_size == fields.get("fsdp_size", 1)
    own = PROMPTS[torch.distributed.get_rank() // 2 :][:1]
    model(own, labels=own).loss.backward()
    return full_gradients(model)


@pytest.mark.parametrize("field", [name for name in SIZES if hasattr(DistributedConfig(), name)])
@on_ranks(4)
def test_copies_train_as_one_process(folder, field) -> None:
    one = AutoModelForCausalLM.from_pretrained(folder).train()
    sum(one(own[None], labels=own[None]).loss / 2 for own in PROMPTS).backward()
    errors = relative_errors(gradients_on_mesh(folder, {field: 2}), full_gradients(one))
    assert max(errors.values()) < TOLERANCE, errors


def gradients_of_one_copy(folder: str, fields: dict[str, Any]) -> None:
    """Run on every rank: the ranks of the second copy lack the checkpoint, as on a machine of their own."""
    gradients_on_mesh(folder if int(os.environ["RANK"]) < 2 else f"{folder}/missing", fields)


def test_a_copy_that_does_not_load_stops_the_others(pool, cases) -> None:
    if not hasattr(DistributedConfig(), "dp_replicate_size"):
        pytest.skip("this release has no such field")
    with pytest.raises(WorkerError) as caught:
        pool.run(4, gradients_of_one_copy, cases(9, 3).folder, {"dp_replicate_size": 2})
    own, others = caught.value.errors[2], caught.value.errors[0]
    assert "missing" in own
    assert others == own.replace("Error: ", "Error: copy 1 of the model: ", 1)
    assert [caught.value.errors[rank] for rank in range(4)] == [others, others, own, own]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tp_size": 2, "pp_size": 2}, "got pp_size=2 beside tensor parallelism"),
        ({"tp_size": 2, "fsdp_mixed_precision": True}, "got fsdp_mixed_precision without fsdp_size beside"),
        ({"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}, "got both fsdp_size=2 and dp_replicate_size=2"),
        ({"tp_size": 2, "tp_plan": {}}, "got tp_plan={} beside"),
        ({"tp_size": 3}, "tp_size: got 3, expected 1, the number of ranks"),
        ({"tp_size": 2, "fsdp_size": 2}, "got 2 copies of a model on 2 ranks each, expected 1 ranks"),
    ],
)
def test_the_rest_is_refused_by_name(cases, fields, expected) -> None:
    if not fields.keys() <= vars(DistributedConfig()).keys():
        pytest.skip("this release has no such field")
    with pytest.raises(tp_transformers.TensorParallelError, match=expected):
        load(cases(9, 3).folder, tp_plan=None, distributed_config=DistributedConfig(**fields))


def test_one_argument_says_how_many_ranks(cases) -> None:
    with pytest.raises(tp_transformers.PlanError, match="got both distributed_config and device_map, expected one"):
        load(cases(9, 3).folder, tp_plan=None, device_map="cpu", distributed_config=DistributedConfig(tp_size=2))
    with pytest.raises(tp_transformers.PlanError, match="got both tp_plan and distributed_config"):
        load(cases(9, 3).folder, distributed_config=DistributedConfig(tp_size=2))


def test_without_tensor_parallelism_transformers_loads(cases) -> None:
    model = load(cases(9, 3).folder, tp_plan=None, distributed_config=DistributedConfig(tp_size=1))
    assert not tp_transformers.is_tensor_parallel(model)
