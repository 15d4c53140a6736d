"""transformers' continuous batching on any number of heads answers as one process' `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.support.models import load
from tests.support.pool import Pool
from tests.support.tiers import wide

continuous_batching = pytest.importorskip("transformers.generation.configuration_utils")

pytestmark = pytest.mark.distributed

PROMPTS = [[5, 9, 41, 150], [23, 9, 41, 198, 3, 77, 12], [17, 5, 98, 150, 4]]
NEW = 8


def batched(folder: str) -> list[list[int]]:
    """Run on every rank."""
    outputs = load(folder).generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=continuous_batching.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((9, 3), 3), ((8, 1), 3)], 1))
def test_batches_are_answered_as_by_one_process(pool: Pool, cases: Any, heads: tuple[int, int], size: int) -> None:
    folder = cases(*heads).folder
    one = AutoModelForCausalLM.from_pretrained(folder)
    expected = [
        one.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert pool.run(size, batched, folder) == [expected] * size
