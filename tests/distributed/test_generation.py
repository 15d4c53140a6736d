"""`generate` on several ranks: what one process generates, whatever the ranks' seeds, clocks and users' code."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import tp_transformers
from tests.architectures import ARCHITECTURES
from tests.models import MASK, PROMPTS, relative
from tests.pool import Pool, WorkerError

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order
SETTINGS = {"attention_mask": MASK, "max_new_tokens": 6}


def load(folder: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    with tp_transformers.enable():
        return auto.from_pretrained(folder, **{"tp_plan": "auto", **arguments}).eval()


def rank() -> int:
    return int(os.environ["RANK"])


# -- one random state


def sample(model: Any, seed: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens, and the random state that is left."""
    torch.manual_seed(seed)
    tokens = model.generate(PROMPTS, **{**SETTINGS, "do_sample": True, **settings})
    return tokens, torch.get_rng_state()


def sampled_otherwise(folder: str, draft: str) -> list[str]:
    """The ways to sample in which ranks of different seeds are not one process with the seed of rank 0."""
    ours, theirs = load(folder), LlamaForCausalLM.from_pretrained(folder)
    assistants = {
        "a sharded assistant": [load(draft), LlamaForCausalLM.from_pretrained(draft)],
        "a whole assistant": [LlamaForCausalLM.from_pretrained(draft)] * 2,
    }
    one = {"attention_mask": MASK[1:], "inputs": PROMPTS[1:]}
    ways: dict[str, list[dict[str, Any]]] = {
        "sampling": [{}] * 2,
        "top k and p": [{"top_k": 9, "top_p": 0.9, "temperature": 1.4, "num_return_sequences": 2}] * 2,
        "beam sampling": [{"num_beams": 3}] * 2,
        "prompt lookup": [{**one, "prompt_lookup_num_tokens": 2}] * 2,
        **{name: [{**one, "assistant_model": model} for model in pair] for name, pair in assistants.items()},
    }
    different = []
    for name, settings in ways.items():
        results = []
        for model, seed, own in zip((ours, theirs), (7 + rank(), 7), settings, strict=True):
            torch.manual_seed(seed)
            tokens = model.generate(**{"inputs": PROMPTS, **SETTINGS, "do_sample": True, **own})
            results.append((tokens, torch.get_rng_state()))
        if not all(map(torch.equal, *results)):
            different.append(name)
    return different


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sample_what_one_process_with_the_seed_of_rank_0_does(pool: Pool, cases: Any, size: int) -> None:
    assert pool.run(size, sampled_otherwise, cases(9, 3).folder, cases(8, 2).folder) == [[]] * size
