"""Decoding in bfloat16 on CPU ranks, beside one process without this package."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import PROMPTS, load
from tp_transformers.features.cpu_decode import products

pytestmark = pytest.mark.distributed


def decoded(model: Any, tokens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of six steps, greedy or along `tokens`: (6, vocabulary), (13,)."""
    forced = {} if tokens is None else {"prefix_allowed_tokens_fn": lambda _, ids: [int(tokens[len(ids)])]}
    output = model.generate(
        PROMPTS[1:], max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True, **forced
    )
    return torch.cat(output.logits), output.sequences[0]


def decode(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(products, "onednn_is_slow", return_value=True):
        return decoded(load(folder, dtype=torch.bfloat16), tokens)[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_are_as_exact_as_those_of_one_process(pool: Any, cases: Any, ranks: int) -> None:
    folder = cases(9, 3).folder
    exact, tokens = decoded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    alone, _ = decoded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    for logits in pool.run(ranks, decode, folder, tokens):
        assert (logits - exact).norm() < 1.5 * (alone - exact).norm()
