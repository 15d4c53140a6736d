"""Checkpoints that transformers converts as it loads them, and reverts as it saves them."""

from __future__ import annotations

import json

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from tests.support.comparisons import assert_same_tensors, equal_parameters, read_folder, relative
from tests.support.models import PROMPTS, bytes_read, llama_config, load, save_as_loaded

TOLERANCE = 1e-4  # fp32 sums in another order


def convert_and_save(folder: str, target: str) -> None:
    """Run on every rank."""
    model = load(folder, tp_plan={"model.layers.*.self_attn.q_proj": "colwise_rep", "lm_head": "colwise_rep"})
    whole = MixtralForCausalLM.from_pretrained(folder)
    assert equal_parameters(model, whole)
    with torch.no_grad():
        assert relative(model(PROMPTS).logits, whole(PROMPTS).logits) < TOLERANCE
    model.save_pretrained(target, max_shard_size="100KB")


def test_converted_checkpoints_load_and_save(pool, tmp_path) -> None:
    torch.manual_seed(0)
    config = llama_config(8, 2, kind=MixtralConfig, num_local_experts=3, num_experts_per_tok=2)
    save_as_loaded(MixtralForCausalLM(config), tmp_path, max_shard_size="100KB")
    with open(tmp_path / "checkpoint" / "model.safetensors.index.json") as file:
        assert any("experts.0" in name for name in json.load(file)["weight_map"]), "experts are stored one by one"
    pool.run(2, convert_and_save, str(tmp_path / "checkpoint"), str(tmp_path / "saved"))
    assert_same_tensors(tmp_path / "checkpoint", tmp_path / "saved")


TRANSPOSED = {
    "model.language_model.layers.*.mlp.experts": "moe_tp_experts",
    "model.language_model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.language_model.layers.*.mlp.experts.down_proj": "rowwise",
}


def save_transposed(folder: str, target: str) -> float:
    model = load(folder, Qwen3VLMoeForConditionalGeneration, tp_plan=TRANSPOSED)
    model.save_pretrained(target)
    return bytes_read(model)


def test_converters_that_measure_parameters_see_them_whole(pool, tmp_path) -> None:
    # Experts of 24 features in blocks of 8 are cut 16 and 8: plain tensors, whose local shape is not the whole one.
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(
        text_config=llama_config(8, 2, kind=dict, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )
    save_as_loaded(Qwen3VLMoeForConditionalGeneration(config), tmp_path)
    read = pool.run(2, save_transposed, str(tmp_path / "checkpoint"), str(tmp_path / "saved"))
    assert_same_tensors(tmp_path / "checkpoint", tmp_path / "saved")
    assert read[1] < read[0] < sum(tensor.nbytes for tensor in read_folder(tmp_path / "checkpoint").values())
