"""A StaticCache that is initialised before its first input, for torch.export or CUDA graphs."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from transformers import StaticCache

from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.pool import Pool
from tp_transformers import UnsupportedError
from tp_transformers.debug import head_counts

pytestmark = pytest.mark.distributed


def early(model: Any, heads: int | list[int]) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(len(PROMPTS), heads, model.config.head_dim, dtype=model.dtype, device=model.device)
    return cache


def generate_early(folder: str) -> bool:
    """Whether tokens are those of one process with this rank's heads; the heads of the config are refused."""
    model, whole = load_both(folder)
    settings = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    own, full = [kv for _, kv in head_counts(model).values()], model.config.num_key_value_heads
    told = rf"past_key_values: got {full} KV heads in layer 0 of a StaticCache, expected {own[0]}.*head_counts"
    for argument in {"past_key_values", "cache"} & {"past_key_values", *signature(type(whole).forward).parameters}:
        with pytest.raises(UnsupportedError, match=told):
            model.generate(PROMPTS, **{argument: early(model, full)}, **settings)
    with pytest.raises(UnsupportedError, match=told):
        model(PROMPTS, past_key_values=early(model, full))
    expected = whole.generate(PROMPTS, past_key_values=early(whole, full), **settings)
    return torch.equal(model.generate(PROMPTS, past_key_values=early(model, own), **settings), expected)


@needs("refusals")
@pytest.mark.parametrize("heads", [(9, 3), pytest.param((8, 2), marks=pytest.mark.slow)])
def test_an_early_cache_has_the_heads_of_its_rank(pool: Pool, cases: Any, heads: tuple[int, int]) -> None:
    assert all(pool.run(2, generate_early, cases(*heads).folder))


def counts(folder: str) -> dict[str, tuple[int, int]]:
    return head_counts(load(folder))


def test_heads_of_ranks_are_those_of_the_model(pool: Pool, cases: Any) -> None:
    name = "model.layers.1.self_attn"
    for size, expected in ((2, [(6, 2), (3, 1)]), (1, [(9, 3)])):
        assert [rank[name] for rank in pool.run(size, counts, cases(9, 3).folder)] == expected
