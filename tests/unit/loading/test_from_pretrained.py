"""`from_pretrained` in one process: with a plan, without one, and with arguments that cannot be."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import equal_parameters
from tests.support.models import Case


def test_without_tp_plan_transformers_runs_untouched(cases: Any) -> None:
    case: Case = cases(8, 4)
    plain = LlamaForCausalLM.from_pretrained(case.folder)
    with tp_transformers.enable():
        hooked, info = LlamaForCausalLM.from_pretrained(case.folder, output_loading_info=True)
    assert type(hooked) is LlamaForCausalLM
    assert not tp_transformers.is_tensor_parallel(hooked)
    assert not info["missing_keys"]
    assert vars(hooked).keys() == vars(plain).keys()
    assert equal_parameters(hooked, plain)
    assert not torch.distributed.is_initialized()


def test_one_process_is_size_one_without_a_group(cases: Any) -> None:
    case: Case = cases(9, 3)
    with tp_transformers.enable():
        model = AutoModelForCausalLM.from_pretrained(case.folder, tp_plan="auto")
    assert not torch.distributed.is_initialized()
    assert tp_transformers.is_tensor_parallel(model)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, LlamaForCausalLM)
    assert model.tp_size == 1
    plain = LlamaForCausalLM.from_pretrained(case.folder)
    assert equal_parameters(model, plain)
    assert {type(param) for param in model.parameters()} == {torch.nn.Parameter}  # no shards, which are gathered
    assert model.tp_plan == model._tp_plan
    assert model.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert model.tp_plan["lm_head"] == "colwise_rep"


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"tp_plan": "auto", "device_map": "auto"}, tp_transformers.PlanError, "both tp_plan and device_map"),
        ({"tp_plan": "auto", "tp_size": 2}, tp_transformers.MeshError, "torchrun --nproc-per-node 2"),
        ({"tp_plan": 7}, tp_transformers.PlanError, "tp_plan: got 7"),
        ({"tp_plan": "no/such.yaml"}, tp_transformers.PlanError, "no/such.yaml"),
        ({"tp_plan": {"model.norm": "colwize"}}, tp_transformers.PlanError, "model.norm: unknown strategy 'colwize'"),
        ({"tp_plan": {"model.normal": "replicate"}}, tp_transformers.PlanError, "matches no module"),
        ({"tp_plan": {"up_proj": "colwise"}}, tp_transformers.PlanError, "up_proj"),
    ],
)
def test_bad_arguments(cases: Any, arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with tp_transformers.enable(), pytest.raises(kind) as caught:
        AutoModelForCausalLM.from_pretrained(cases(8, 4).folder, **arguments)
    assert says in str(caught.value)
    assert "tp_transformers" in traceback.extract_tb(caught.tb)[-1].filename
    assert not torch.distributed.is_initialized()
