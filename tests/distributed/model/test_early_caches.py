"""A StaticCache that is initialised before its first input, for torch.export or CUDA graphs."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from transformers import StaticCache

from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tp_transformers import UnsupportedError
from tp_transformers.debug import head_counts


def early(model: Any, heads: int | list[int]) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=32)
    cache.early_initialization(len(PROMPTS), heads, model.config.head_dim, dtype=model.dtype, device=model.device)
    return cache


@needs("refusals")
@pytest.mark.parametrize("heads", [(9, 3), pytest.param((8, 2), marks=pytest.mark.slow)])
@on_ranks(2)
def test_an_early_cache_has_the_heads_of_its_rank(folder) -> None:
    """With this rank's heads, tokens are those of one process; the heads of the config are refused."""
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
    assert torch.equal(model.generate(PROMPTS, past_key_values=early(model, own), **settings), expected)


@pytest.mark.parametrize(("size", "expected"), [(2, [(6, 2), (3, 1)]), (1, [(9, 3)])])
@on_ranks()
def test_heads_of_ranks_are_those_of_the_model(folder, expected) -> None:
    model = load(folder)
    assert head_counts(model)["model.layers.1.self_attn"] == expected[model.tp_group.rank]
