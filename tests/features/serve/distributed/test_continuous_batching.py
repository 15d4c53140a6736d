"""transformers' continuous batching on any number of heads answers as one process' `generate`."""

import os
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.support.models import load
from tests.support.tiers import wide

api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
continuous_batching = pytest.importorskip("transformers.generation.configuration_utils")

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


def greedy(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of one process."""
    one = AutoModelForCausalLM.from_pretrained(folder)
    return [
        one.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((9, 3), 3), ((8, 1), 3)], 1))
def test_batches_are_answered_as_by_one_process(pool, cases, heads, size) -> None:
    folder = cases(*heads).folder
    assert pool.run(size, batched, folder) == [greedy(folder, PROMPTS)] * size


def sampled(model: Any) -> list[Any]:
    """The tokens, or the error, of one request after another, each with a seed of rank 0 alone."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=True, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=continuous_batching.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128),
    )
    manager.start()
    found: list[Any] = []
    for seed, prompt in enumerate([PROMPTS[0], *PROMPTS]):  # the first one waits for the batches, which may draw
        if manager.is_tp_driver:
            torch.manual_seed(seed)
            manager.add_request(prompt)
        while (output := manager.get_result(timeout=1)) is None and manager.is_running():
            pass
        found.append(None if output is None else output.error or output.generated_tokens)
    manager.stop(hard_stop=True)
    return found


def sampled_by_ranks(folder: str) -> list[Any]:
    return sampled(load(folder))[1:]


def sampled_astray(folder: str) -> list[Any]:
    """Rank 1 takes another token than rank 0."""
    rank, take = int(os.environ["RANK"]), api.RequestState.update_and_check_completion
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            api.RequestState, "update_and_check_completion", lambda self, token, *rest: take(self, token + rank, *rest)
        )
        return sampled(load(folder))


by_requests_to_one_rank = pytest.mark.skipif(
    not hasattr(api, "DistributedHelper"), reason="all ranks get the requests in this release"
)


@by_requests_to_one_rank
def test_a_seed_of_one_rank_is_that_of_all(pool, cases) -> None:
    folder = cases(9, 3).folder
    expected = sampled(AutoModelForCausalLM.from_pretrained(folder))[1:]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert pool.run(2, sampled_by_ranks, folder) == [expected] * 2


@by_requests_to_one_rank
def test_ranks_that_decode_other_texts_are_told(pool, cases) -> None:
    for error, *_ in pool.run(2, sampled_astray, cases(9, 3).folder):
        assert error.startswith("continuous batching: got other requests or tokens on some ranks")
