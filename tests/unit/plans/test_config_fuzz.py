"""Mutated configs: transformers refuses the model, or the shipped plan fits it, or one short error says why not."""

from __future__ import annotations

import json
import random
import traceback
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.fuzz import fuzz_cases, kept
from tests.support.models import llama_config
from tests.support.needs import needs
from tp_transformers import PlanError, TensorParallelError
from tp_transformers.features.planner.kv_cache import cached_attention
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

COUNT = 60
"""Configs a seed."""
LONGEST = 4000
"""Characters of a message: 20 faults of 200."""

LLAMA = llama_config(8, 4).to_dict()
GPT2 = {"model_type": "gpt2", "vocab_size": 99, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        **{name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        "model_type": "gemma3_text",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "vision_config": None,
}
CONFIGS = (LLAMA, {**LLAMA, "num_hidden_layers": 1, "head_dim": None}, GPT2, GEMMA3)
_WORDS = """
num_attention_heads num_key_value_heads head_dim hidden_size intermediate_size vocab_size num_hidden_layers n_head
n_embd text_config tie_word_embeddings model_type sliding_window layer_types max_position_embeddings num_heads
activation_sparsity_pattern kv_lora_rank qk_nope_head_dim num_kv_heads head_size pad_token_id
"""
NAMES = _WORDS.split()
ODD = [None, 0, -1, -8, 1, 3, 7, 1.5, 8.0, "8", "", "x", True, False, [], [4], {}, {"a": 1}]


def mutated(rng: random.Random) -> bytes:
    """One of CONFIGS with one change or two, as JSON."""
    config: dict[str, Any] = json.loads(json.dumps(rng.choice(CONFIGS), default=str))
    for _ in range(rng.choice([1, 1, 2])):
        text = config.get("text_config")
        owner = text if isinstance(text, dict) and rng.random() < 0.8 else config
        present = [each for each in NAMES if each in owner]
        name = rng.choice(present if present and rng.random() < 0.8 else NAMES)
        if rng.random() < 0.1:
            owner.pop(name, None)
        else:
            owner[name] = rng.choice(ODD)
    return json.dumps(config).encode()


def made(data: dict[str, Any]) -> Any:
    """The model of a config, without memory; None where transformers refuses it."""
    try:
        config = AutoConfig.for_model(**data)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception:
        return None


@pytest.mark.parametrize("seed", range(2))
def test_a_config_has_a_plan_or_one_error(seed) -> None:
    total = fit = 0
    for case in fuzz_cases(seed, COUNT, mutated):
        total += 1
        with kept(case):
            model = made(json.loads(case.content))
            if model is None:
                continue
            try:
                plan = Plan.for_model(model)
                assert plan is not None
                resolution = resolve(plan, model, 2)
                list(cached_attention(model, resolution.attention, 2, batch=1, context=5))
                fit += 1
            except Exception as error:
                if isinstance(error, TensorParallelError) and len(str(error)) < LONGEST:
                    continue
                if "/transformers/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                    raise  # transformers' own cache refuses windows that its models take
    assert fit >= total // 10


def test_head_counts_below_one_are_one_fault() -> None:
    model = made({**GPT2, "n_head": -8})
    plan = Plan.for_model(model)
    with pytest.raises(PlanError, match=r"attention transformer.h.0.attn: 0 query heads are not a multiple of 0"):
        resolve(plan, model, 2)
    with pytest.raises(PlanError, match="got 0 query heads and a hidden size of 32, expected numbers above 0"):
        list(cached_attention(model, {}, 2, batch=1, context=5))


@needs("architectures")
def test_a_sparsity_pattern_that_is_no_list_counts_as_one_for_all_layers() -> None:
    model = made({**LLAMA, "activation_sparsity_pattern": 0.95})
    plan = Plan.for_model(model)
    with pytest.raises(PlanError, match="with activation_sparsity_pattern its features are compared"):
        resolve(plan, model, 2)
