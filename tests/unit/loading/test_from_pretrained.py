"""`from_pretrained` in one process: with a plan, and without one."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import equal_parameters
from tests.support.models import Case


def test_without_tp_plan_transformers_runs_untouched(cases) -> None:
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


def test_one_process_is_size_one_without_a_group(cases) -> None:
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
