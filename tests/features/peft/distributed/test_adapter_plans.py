"""Adapters of a head that shards its full inputs, files that lack tensors, and mixed models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.peft.distributed.test_adapter_kinds import KINDS
from tests.support.adapters import TOLERANCE, train
from tests.support.comparisons import relative
from tests.support.models import edited, load, load_both, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

OF_HEAD = (
    AdaLoraConfig(init_r=3, target_modules=["lm_head"], lora_dropout=0.3, total_step=9, task_type="CAUSAL_LM"),
    VeraConfig(r=4, target_modules=["lm_head"], vera_dropout=0.3, task_type="CAUSAL_LM"),
)


@pytest.fixture
def head_plan(tmp_path: Path) -> str:
    """A plan whose head shards its full inputs."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"model_type": "llama", "extends": "llama", "heads": {"lm_head": "rowwise_rep"}}))
    return str(plan)


@on_ranks(num_hidden_layers=1)
def test_a_head_that_shards_its_full_inputs(folder, head_plan, tmp_path) -> None:
    for config in OF_HEAD:
        train(folder, tmp_path / config.peft_type, config, tp_plan=head_plan)
    with pytest.raises(tp_transformers.UnsupportedError, match=r"OFT .* got lm_head, which has the strategy"):
        get_peft_model(load(folder, tp_plan=head_plan), OFTConfig(oft_block_size=4, target_modules=["lm_head"]))


@on_ranks(num_hidden_layers=1)
def test_lacking_tensors_and_mixed_models_are_refused(folder, tmp_path) -> None:
    model, scratch = load(folder), str(tmp_path)
    if dist.get_rank() == 0:
        config = OFTConfig(oft_block_size=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(scratch)
        tensors = load_file(f"{scratch}/adapter_model.safetensors")
        tensors.pop(next(name for name in tensors if "o_proj" in name))
        save_file(tensors, f"{scratch}/adapter_model.safetensors")
    dist.barrier()
    with pytest.raises(tp_transformers.CheckpointError, match=r"missing .*o_proj\.oft_R"):
        load(folder).load_adapter(scratch)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(tp_transformers.UnsupportedError, match="PeftMixedModel"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]), mixed=True)
    assert [name for name, _ in model.named_parameters()] == names


WITH_BIASES = ("DoRA with dropout", "LoHa", "IA3", "OFT", "rsLoRA", "DoRA", "AdaLoRA", "LoKr", "VeRA")


def draw_biases(tensors: dict[str, torch.Tensor]) -> None:
    for index, (name, tensor) in enumerate(tensors.items()):
        if name.endswith(".bias"):
            tensors[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))


@pytest.fixture
def with_biases(cases: Any, tmp_path: Path) -> str:
    """A model whose linears have biases."""
    made = cases(9, 3, attention_bias=True, mlp_bias=True, num_hidden_layers=1).folder
    return edited(made, tmp_path / "model", draw_biases)


@pytest.mark.parametrize("kind", wide(WITH_BIASES, 4))
@on_ranks()
def test_linears_with_biases(with_biases, tmp_path, kind) -> None:
    """A row-parallel linear adds its bias once, after the sum; its adapters have none."""
    train(with_biases, tmp_path, KINDS[kind])


@on_ranks(num_hidden_layers=1)
def test_targets_by_default(folder) -> None:
    """The modules that PEFT knows for a model type."""
    for config in (IA3Config(), OFTConfig(oft_block_size=8), LoraConfig(use_dora=True)):
        models = [get_peft_model(model, copy.deepcopy(config)) for model in load_both(folder)]
        targets = [model.peft_config["default"].target_modules for model in models]
        assert targets[0] == targets[1] is not None
        assert relative(logits_of(models[0]), logits_of(models[1])) < TOLERANCE
