"""`generate` on devices of several kinds: the text of one process with the device of rank 0."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.models import MASK, PROMPTS, load
from tp_transformers import MeshError

BATCH = {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": 6}
SAMPLED: dict[str, dict[str, Any]] = {"sampling": {"do_sample": True}, "beams": {"do_sample": True, "num_beams": 3}}


def draw_on_other_devices(folder: str) -> list[Any]:
    """Run on every rank, of which rank 1 has another kind of device, whose kernels draw other numbers.

    Returns whether the tokens are those of one process, for each way; and the errors of two ways to draft.
    """
    ours, plain, rank = load(folder), LlamaForCausalLM.from_pretrained(folder), int(os.environ["RANK"])
    draw, found = torch.multinomial, []

    def other(probs: torch.Tensor, **settings: Any) -> torch.Tensor:
        return (draw(probs, **settings) + rank) % probs.shape[-1]

    for settings in SAMPLED.values():
        torch.manual_seed(rank)
        with mock.patch.object(torch, "multinomial", other), other_device(rank):
            tokens = ours.generate(**BATCH, **settings)
        torch.manual_seed(0)
        found.append(torch.equal(tokens, plain.generate(**BATCH, **settings)))
    for drafts in ({"assistant_model": plain}, {"prompt_lookup_num_tokens": 3}):
        with other_device(rank), pytest.raises(MeshError) as raised:
            ours.generate(**{**BATCH, "inputs": PROMPTS[1:], "attention_mask": MASK[1:]}, **drafts)
        found.append(str(raised.value))
    return found


def other_device(rank: int) -> Any:
    return mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=("AVX512", "AVX2")[rank])


def test_ranks_on_devices_of_two_kinds_take_the_tokens_of_rank_0(pool, cases) -> None:
    for *are_equal, assisted, looked_up in pool.run(2, draw_on_other_devices, cases(9, 3).folder):
        assert are_equal == [True] * len(SAMPLED)
        assert "assistant_model: got ranks on AVX2 and AVX512" in assisted
        assert "prompt_lookup_num_tokens: got ranks on AVX2 and AVX512" in looked_up
