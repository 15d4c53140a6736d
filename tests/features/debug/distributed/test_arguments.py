"""Arguments of `generate` that differ between ranks are one error on all of them."""

import os

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.models import MASK, PROMPTS, load
from tp_transformers import MeshError


def differ(folder: str) -> list[str]:
    """Run on every rank: what is told where the ranks' arguments differ."""
    model, rank, found = load(folder), int(os.environ["RANK"]), []
    batch = {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": 6}
    for arguments in (
        {"inputs": PROMPTS + rank},
        {"attention_mask": MASK if rank else None, "max_new_tokens": 6 + rank},
        {"tokenizer": PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast) if rank else None},
    ):
        with pytest.raises(MeshError) as raised:
            model.generate(**batch | arguments)
        found.append(str(raised.value))
    return found


def test_what_differs_on_one_rank_is_told_on_all(pool, cases) -> None:
    here, there = pool.run(2, differ, cases(9, 3).folder, timeout=90)
    assert here == there
    same = "got one on rank 0 and another on rank 1, expected the same on all ranks of a model"
    names = ("inputs", "attention_mask, max_new_tokens", "tokenizer")
    for told, name in zip(here, names, strict=True):
        assert told.startswith(f"generate's {name}: {same}")
