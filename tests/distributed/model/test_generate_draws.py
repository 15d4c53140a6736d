"""`generate` with a user's own code that draws random numbers: the text of one process, or one error on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests.support.models import MASK, PROMPTS, VOCAB, load
from tests.support.on_ranks import on_ranks
from tp_transformers import MeshError
from tp_transformers.ranks import direct

NEW = 6
BATCH = {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": NEW}


class Draws(LogitsProcessor):
    """Bans half of the tokens at random in every step."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = torch.tensor([self.draw() < 0.5 for _ in range(VOCAB)])
        return scores.masked_fill(banned, -1e4)


class Stops(StoppingCriteria):
    """Stops a sequence at random."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([random.random() < 0.2 for _ in input_ids])


def prefix(batch: int, ids: torch.Tensor) -> list[int]:
    return [random.randrange(VOCAB), int(np.random.randint(VOCAB))]


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": lambda: {"logits_processor": LogitsProcessorList([Draws(np.random.random)])},
    "random": lambda: {"logits_processor": LogitsProcessorList([Draws(random.random)]), "do_sample": True},
    "prefix": lambda: {"prefix_allowed_tokens_fn": prefix, "num_beams": 2},
    "stop": lambda: {"stopping_criteria": StoppingCriteriaList([Stops()]), "do_sample": True},
}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn(model: Any) -> list[Any]:
    """The tokens of every way, and the next number of each generator."""
    found = [model.generate(**BATCH, **way()).tolist() for way in WAYS.values()]
    return [*found, random.random(), np.random.random(), torch.rand(()).item()]


def shared(folder: str) -> list[Any]:
    """Run on every rank, each with another seed."""
    model = load(folder)
    seed(model.tp_group.rank)
    return drawn(model)


def test_ranks_share_the_generators_of_numpy_and_random(pool, cases) -> None:
    folder = cases(9, 3).folder
    model = LlamaForCausalLM.from_pretrained(folder)
    seed(0)
    assert pool.run(2, shared, folder, timeout=60) == [drawn(model)] * 2


def own_generator(folder: str, way: str) -> str:
    """Run on every rank: what it raises where the user's code draws from a generator of the rank's own."""
    model = load(folder)
    draw = np.random.default_rng(model.tp_group.rank).random
    ways = {
        "processor": {"logits_processor": LogitsProcessorList([Draws(draw)])},
        "prefix": {"prefix_allowed_tokens_fn": lambda *_: [int(draw() * VOCAB)], "num_beams": 2},
    }
    try:
        model.generate(**BATCH, **ways[way])
    except MeshError as error:
        again = model.generate(**BATCH, do_sample=False)
        return f"{error} {again.tolist()}"
    return "nothing"


@pytest.mark.parametrize(("way", "name"), [("processor", "Draws"), ("prefix", "prefix_allowed_tokens_fn")])
def test_different_tokens_are_one_error_on_all_ranks(pool, cases, way, name) -> None:
    first, second = pool.run(2, own_generator, cases(9, 3).folder, way, timeout=60)
    assert first == second
    assert first.startswith("generate's tokens: got ")
    assert " on rank 0 and " in first
    assert f"at position {PROMPTS.shape[1]} of sequence 0, expected the same on all ranks of a model. {name} " in first


@on_ranks(2)
def test_only_with_a_users_own_code_are_tokens_compared(folder) -> None:
    """By maxima over the ranks."""
    model = load(folder)
    for way, maxima in (({}, 0), (WAYS["numpy"](), NEW)):
        with mock.patch.object(direct, "all_reduce", wraps=direct.all_reduce) as counted:
            model.generate(**BATCH, **way, do_sample=False)
        assert sum(call.args[2:] == (direct.MAX,) for call in counted.call_args_list) == maxima
