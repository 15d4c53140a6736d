"""Arguments of `generate` by position, for classes with a `generate` of their own, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from tests.support.models import MASK, PROMPTS, load
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

NEW = 6


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.flatten())

    def end(self) -> None:
        pass


class Passing(LlamaForCausalLM):
    """As Granite Speech and Kyutai's speech-to-text."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class Naming(LlamaForCausalLM):
    """With a name of its own for the prompt, which only a position can fill."""

    def generate(self, prompt: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().generate(prompt, *args, **kwargs)


def by_position(folder: str) -> list[str]:
    """The calls with positional arguments that differ from one process, or tell another error."""
    different = []
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for kind in (Passing, Naming):
        model, whole, own = load(folder, kind), kind.from_pretrained(folder), Collector()
        expected = whole.generate(PROMPTS, config, attention_mask=MASK)
        if not torch.equal(model.generate(PROMPTS, config, attention_mask=MASK), expected):
            different.append(f"{kind.__name__}'s tokens")
        model.generate(PROMPTS[1:], config, *[None] * 5, own if dist.get_rank() else None)
        if dist.get_rank() and not torch.equal(
            torch.cat(own.tokens[1:]), whole.generate(PROMPTS[1:], config)[0, -NEW:]
        ):
            different.append(f"{kind.__name__}'s stream")
        for arguments, named, told in (
            ((PROMPTS + dist.get_rank(), config), {}, "MeshError: generate's"),
            ((PROMPTS, config), {"generation_config": config}, "TypeError:"),
        ):
            try:
                model.generate(*arguments, **named)
                different.append(f"{kind.__name__}: no {told}")
            except Exception as error:
                if not f"{type(error).__name__}: {error}".startswith(told):
                    different.append(f"{kind.__name__}: {error}")
    return different


def test_positions_stay_positions_where_a_class_has_its_own_generate(pool: Pool, cases: Any) -> None:
    assert pool.run(2, by_position, cases(9, 3).folder) == [[]] * 2
