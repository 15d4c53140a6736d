"""Random widths, batches and questions: the logits of an invariant plan have the bits of one process."""

from __future__ import annotations

import inspect
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.fuzz import fuzz_cases, kept
from tests.support.invariance import auto_class, has_bits
from tests.support.models import load
from tp_transformers.features.verify.small_models.model import on_threads

pytestmark = pytest.mark.slow

CASES = 6
"""Models of each seed; FUZZ=10 makes 10 times as many."""
QUESTIONS = 8
"""Questions to each model."""


def random_case(choose: random.Random) -> bytes:
    """A config with widths that are multiples of little, ranks, and questions (rows, tokens, last ones, frozen)."""
    heads, size = choose.randint(3, 6), choose.choice((2, 2, 3))
    inner, vocab = choose.randint(64 * size, 500), choose.randint(64 * size, 500)
    kind = choose.choice(("Llama", "Qwen3", "Phi3", "GPT2", "T5"))
    config: dict[str, Any] = {"vocab_size": vocab, "eos_token_id": None, "pad_token_id": 0}
    if kind == "GPT2":
        config |= {"n_embd": 64 * heads, "n_head": heads, "n_layer": 1, "n_inner": inner // 4 * 4}
    elif kind == "T5":
        config |= {"d_model": 64 * heads, "d_kv": 64, "num_heads": heads, "num_layers": 1, "d_ff": inner}
        config |= {"decoder_start_token_id": 0, "feed_forward_proj": choose.choice(("relu", "gated-gelu"))}
    else:
        config |= {"hidden_size": 64 * heads, "intermediate_size": inner, "num_hidden_layers": 1, "head_dim": 64}
        config |= {"num_attention_heads": heads, "num_key_value_heads": choose.choice((heads, size))}
        if heads % config["num_key_value_heads"]:
            config["num_key_value_heads"] = heads
    questions = [
        (choose.randint(1, 5), choose.randint(1, 34), choose.choice((0, 1, 1, 2)), choose.random() < 0.3)
        for _ in range(QUESTIONS)
    ]
    case = {"kind": kind, "config": config, "size": size, "questions": questions}
    case |= {"dtype": choose.choice(("float32", "float32", "bfloat16")), "attention": choose.choice(("sdpa", "eager"))}
    return json.dumps(case).encode()


def answers(model: Any, questions: list[Any]) -> dict[str, torch.Tensor]:
    """Logits of a forward and of the first steps of `generate`, by question."""
    seen, takes = {}, inspect.signature(model.forward).parameters
    ids = torch.randint(3, model.config.vocab_size, (5, 34), generator=torch.Generator().manual_seed(1))
    for rows, length, keep, is_frozen in questions:
        model.eval().requires_grad_(not is_frozen)
        inputs: dict[str, Any] = {"input_ids": ids[:rows, :length]}
        options = {"logits_to_keep": keep} if keep and "logits_to_keep" in takes else {}
        targets = {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
        name = f"{rows} x {length}, {options}, frozen: {is_frozen}"
        with torch.no_grad():
            seen[name] = model(**inputs, **options, **targets).logits
        settings = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        seen[f"generate of {name}"] = torch.stack(model.generate(**inputs, **settings).logits)
    return seen


def of_ranks(folder: str, case: dict[str, Any]) -> list[str]:
    """Run on every rank: the questions with other bits than those of one process."""
    with on_threads(1):
        options = {"dtype": getattr(torch, case["dtype"]), "attn_implementation": case["attention"]}
        auto = auto_class(transformers.AutoConfig.from_pretrained(folder))
        seen = answers(load(folder, auto=auto, tp_invariant=True, **options), case["questions"])
    expected = torch.load(Path(folder) / "expected")
    return [name for name, value in expected.items() if not has_bits(seen[name], value)]


@pytest.mark.parametrize("seed", range(2))
def test_random_models_have_the_bits_of_one_process(pool, tmp_path, seed) -> None:
    for case in fuzz_cases(seed, CASES, random_case):
        settings = json.loads(case.content)
        folder = str(tmp_path / str(case.number))
        config = getattr(transformers, f"{settings['kind']}Config")(**settings["config"])
        torch.manual_seed(case.number)
        model = auto_class(config).from_config(config)
        for param in model.parameters():
            param.data.add_(torch.randn_like(param), alpha=0.1)
        model.save_pretrained(folder)
        options = {"dtype": getattr(torch, settings["dtype"]), "attn_implementation": settings["attention"]}
        model = auto_class(config).from_pretrained(folder, **options)
        for param in model.parameters():  # aligned in memory
            param.data = param.data.clone()
        with on_threads(1):
            torch.save(answers(model, settings["questions"]), Path(folder) / "expected")
        with kept(case):
            assert pool.run(settings["size"], of_ranks, folder, settings) == [[]] * settings["size"], settings
