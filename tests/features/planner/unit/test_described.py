"""What `plan` says of a config alone: dtype, bytes of quantised weights, KV cache; counted by hand from its numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.models import PROMPTS
from tests.support.tiers import wide
from tests.support.tiny import MODELS, TOWERS
from tp_transformers import CheckpointError
from tp_transformers.errors import UsageError
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.kv_cache import cached_attention
from tp_transformers.features.planner.memory import plan_memory

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "tie_word_embeddings": False, "torch_dtype": "float16", "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_2 = {**LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
LLAMA_3 = {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))],
    },
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip


def linears(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(rows, columns) of the linears of one Llama layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    return [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), *[(inner, hidden)] * 2, (hidden, inner)]


def llama_bytes(config: dict[str, Any], of_linear: Any) -> int:
    """Bytes of a Llama in 16 bits, with linears of `of_linear(rows, columns)` bytes."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    floating = 2 * config["vocab_size"] * hidden + (2 * layers + 1) * hidden
    return 2 * floating + layers * sum(of_linear(rows, columns) for rows, columns in linears(config))


def of_groups(rows: int, columns: int) -> int:
    """4 bits, with a scale in 16 bits and a zero point in 4 for each group of 128 columns."""
    return rows * columns // 2 + (2 * rows + rows // 2) * (columns // 128)


def of_codes(rows: int, columns: int) -> int:
    """4 bits in blocks of 64, whose scales are 8 bits in blocks of 256, found by an index of 16 bits; two tables."""
    blocks = rows * columns // 64
    return rows * columns // 2 + 3 * blocks + 4 * (blocks // 256) + 4 * (16 + 256)


CHANNELS = {
    "quant_method": "compressed-tensors", "format": "naive-quantized", "ignore": ["lm_head"],
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "gptq": (
        LLAMA_2,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        llama_bytes(LLAMA_2, of_groups),
    ),
    "awq": (
        LLAMA_2,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        llama_bytes(LLAMA_2, of_groups),
    ),
    "nf4": (LLAMA_3, {**NF4, "bnb_4bit_use_double_quant": True}, llama_bytes(LLAMA_3, of_codes)),
    "float8 by channel": (LLAMA_3, CHANNELS, llama_bytes(LLAMA_3, lambda rows, columns: rows * columns + 2 * rows)),
    # Experts: 4 bits and an exponent in 8 for 32 values; all else, and the biases of experts, in 16 bits.
    "mxfp4": (GPT_OSS, GPT_OSS["quantization_config"], 13_761_264_768),
    # All linears of a layer but the router: 8 bits, and a scale in 32 for 128 x 128 values.
    "float8 by block": (QWEN3_MOE, QWEN3_MOE["quantization_config"], 31_174_545_408),
    # The same; the router is kept in 32 bits.
    "float8 by block, latents": (DEEPSEEK, DEEPSEEK["quantization_config"], 673_363_413_344),
}


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", wide(EXPECTED, 6))
def test_packed_bytes_of_a_config_are_those_counted_by_hand(tmp_path, name) -> None:
    config, quantization, expected = EXPECTED[name]
    folder = write(tmp_path, {**config, "quantization_config": quantization})
    # No operator of ours has a layout of its own in float16, nor for MXFP4.
    found = survey(folder, packed=True, dtype=torch.bfloat16 if name == "mxfp4" else torch.float16)
    assert plan_memory(found, 1).parameter_bytes == (expected,)
    two = plan_memory(found, 2).parameter_bytes
    assert two[0] == two[1] < 0.51 * expected
    assert any("are taken as quantised" in note for note in found.notes)


ALONE = [name for name in VARIANTS if name != "mxfp4" and "ModelOpt" not in name]
"""Variants that a config describes; of ModelOpt's, the tensors say it."""


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        ("gpt_oss", "mxfp4"),
        *wide([("llama", name) for name in ALONE], 2),
        *wide([("qwen3_moe", name) for name in ALONE], 1),
    ],
)
def test_a_config_has_the_packed_bytes_of_its_checkpoint(tmp_path, model, variant) -> None:
    packed, _ = packed_folder(tmp_path, model, VARIANTS[variant])
    (tmp_path / "alone").mkdir()
    shutil.copy(packed / "config.json", tmp_path / "alone")
    stored, alone = (survey(str(folder), packed=True, dtype=torch.bfloat16) for folder in (packed, tmp_path / "alone"))
    for size in (1, 2, 3):
        assert plan_memory(alone, size).parameter_bytes == plan_memory(stored, size).parameter_bytes


def test_parts_that_the_settings_are_not_of_stay_in_floating_point(tmp_path) -> None:
    """A text config's quantization_config says nothing of the vision tower, and patterns leave out attention."""
    text = {key: LLAMA_3[key] for key in LLAMA_3 if key not in ("architectures", "torch_dtype")}
    text |= {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    text["quantization_config"] = {**CHANNELS, "ignore": ["re:.*self_attn.*", "lm_head"]}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text,
        "vision_config": vision, "torch_dtype": "bfloat16",
    }  # fmt: skip
    found = survey(write(tmp_path, config), packed=True)
    assert sorted(found.packed) == [
        f"model.language_model.layers.{layer}.mlp.{name}_proj.weight"
        for layer in range(2)
        for name in ("down", "gate", "up")
    ]


@pytest.mark.parametrize(
    ("where", "dtype", "said"),
    [
        ({"torch_dtype": "float32"}, torch.float32, None),
        ({"text_config": {"dtype": "float16"}}, torch.float16, "for its text_config alone"),
        ({}, torch.bfloat16, "bfloat16 is a guess"),
    ],
)
def test_the_dtype_is_that_of_a_part_or_a_guess(tmp_path, where, dtype, said) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", **where,
        "vision_config": {"model_type": "clip_vision_model", **small},
        "text_config": {"model_type": "llama", **small, **where.get("text_config", {})},
    }  # fmt: skip
    found = survey(write(tmp_path, config))
    assert found.model.dtype == dtype
    assert [said in note for note in found.notes] == ([] if said is None else [True])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dtype_without_an_operator_is_said(tmp_path, dtype) -> None:
    config, quantization, _ = EXPECTED["awq"]
    small = {**config, "num_hidden_layers": 1, "quantization_config": quantization, "torch_dtype": dtype}
    found = survey(write(tmp_path, small), packed=True)
    assert any("--dtype bf16 has an operator" in note for note in found.notes) is (dtype == "float16")


def test_packed_without_quantised_weights_has_no_effect_and_says_so(tmp_path, printed) -> None:
    folder = write(tmp_path, {**LLAMA_3, "num_hidden_layers": 1})
    said = json.loads(printed("plan", folder, "--tp-size", "2", "--packed", "--json"))
    assert said["notes"] == ["--packed has no effect: nothing is quantised"]


@pytest.mark.parametrize(
    ("config", "memory", "said"),
    wide(
        [
            (EXPECTED["gptq"], "4GB", "3.02 GB of 4.00 GB"),
            (EXPECTED["float8 by block"], "24GB", "15.81 GB of 24.00 GB"),
        ],
        1,
    ),
)
def test_packed_weights_fit_where_a_config_says_so(tmp_path, printed, config, memory, said) -> None:
    folder = write(tmp_path, {**config[0], "quantization_config": config[1]})
    command = ["plan", folder, "--memory", memory, "--tp-size", "2"]
    assert f"it fits: the fullest rank holds {said}" in printed(*command, "--packed")
    assert "it would fit with --packed" in printed(*command, code=1)


def cache_bytes(model: Any, ids: torch.Tensor) -> int:
    """Bytes of the keys and values that a model keeps of some tokens, the last of which was generated."""
    with torch.no_grad():
        cache = getattr(model(ids[:, :-1], use_cache=True), "past_key_values", None)
        if cache is None:
            return 0
        model(ids[:, -1:], past_key_values=cache, use_cache=True)
    return sum(each.untyped_storage().nbytes() for layer in cache.layers for each in (layer.keys, layer.values))


@pytest.mark.parametrize("name", ["bert, both ways", "modernbert-decoder", "gpt_neo", "parakeet_encoder"])
def test_a_cache_is_counted_where_a_model_keeps_one(name) -> None:
    tiny = MODELS[name]
    if not tiny.runs:
        pytest.skip("transformers has no such model yet")
    model, (batch, context) = tiny.make(), PROMPTS.shape
    kept = 0 if name in TOWERS else cache_bytes(model, PROMPTS)
    assert sum(sum(each.nbytes) for each in cached_attention(model, {}, 1, batch=batch, context=context)) == kept
    assert (kept > 0) is (name in ("modernbert-decoder", "gpt_neo"))


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"hidden_size": 100, "num_attention_heads": 32}, "hidden"),  # checked by the config's class, in several lines
        ({"hidden_size": "many"}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope"),
        ({"hidden_act": "nope"}, "nope"),  # known when the model is made
        ({"vocab_size": 9, "pad_token_id": 99}, "adding_idx"),
    ],
)
def test_an_error_of_a_config_is_complete_and_names_the_config(tmp_path, printed, wrong, part) -> None:
    folder = write(tmp_path, {**LLAMA_3, "num_hidden_layers": 1, **wrong})
    with pytest.raises((UsageError, CheckpointError)) as raised:
        survey(folder)
    message, cause = str(raised.value), raised.value.__cause__
    assert " ".join(str(cause).split()) in message
    assert type(cause).__name__ in message
    assert part in message
    assert "Correct its config.json" in message
    assert "path" not in printed("plan", folder, "--tp-size", "2", code=2).replace(folder, "")
