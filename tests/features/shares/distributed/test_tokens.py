"""`generate` on devices of several kinds: the text of one process with the device of rank 0."""

import os
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.models import MASK, PROMPTS, load_both
from tests.support.on_ranks import on_ranks
from tp_transformers import MeshError

BATCH = {"inputs": PROMPTS, "attention_mask": MASK, "max_new_tokens": 6}
SAMPLED: dict[str, dict[str, Any]] = {"sampling": {"do_sample": True}, "beams": {"do_sample": True, "num_beams": 3}}


@on_ranks()
def test_ranks_on_devices_of_two_kinds_take_the_tokens_of_rank_0(folder) -> None:
    """Rank 1 has another kind of device, whose kernels draw other numbers; two ways to draft are refused."""
    (ours, plain), rank, draw = load_both(folder), int(os.environ["RANK"]), torch.multinomial

    def other(probs: torch.Tensor, **settings: Any) -> torch.Tensor:
        return (draw(probs, **settings) + rank) % probs.shape[-1]

    for settings in SAMPLED.values():
        torch.manual_seed(rank)
        with mock.patch.object(torch, "multinomial", other), other_device(rank):
            tokens = ours.generate(**BATCH, **settings)
        torch.manual_seed(0)
        assert torch.equal(tokens, plain.generate(**BATCH, **settings))
    for name, value in {"assistant_model": plain, "prompt_lookup_num_tokens": 3}.items():
        with other_device(rank), pytest.raises(MeshError, match=f"{name}: got ranks on AVX2 and AVX512"):
            ours.generate(**{**BATCH, "inputs": PROMPTS[1:], "attention_mask": MASK[1:], name: value})


def other_device(rank: int) -> Any:
    return mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=("AVX512", "AVX2")[rank])
