"""Embeddings and heads that are wrapped or replaced, or have fewer rows than there are ranks, as in one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from tests.support.comparisons import full_parameters, gradient_differences, relative
from tests.support.models import PROMPTS, VOCAB, llama_config, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

TOLERANCE = 1e-4  # fp32 sums in another order


class Soft(nn.Module):
    """A soft prompt: its rows take the places of the first tokens."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.prompt = embedding, nn.Parameter(torch.randn(2, 72))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.prompt.expand(len(ids), -1, -1), self.embedding(ids[:, len(self.prompt) :])], 1)


class Hashed(nn.Module):
    """An embedding with weights of its own."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rows = nn.Parameter(torch.randn(7, 72))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids % 7]


class Tempered(nn.Module):
    """A head with a temperature."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.temperature = head, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x) / self.temperature
        return logits


class Mixed(nn.Module):
    """A head with weights of its own."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Parameter(torch.randn(VOCAB, 72))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.features.t()


def put(model: Any, kind: type[nn.Module], way: str) -> None:
    """Replace the embedding or the head of `model` by a `kind` around it."""
    if kind in (Soft, Hashed):
        new = kind(model.get_input_embeddings())
        model.set_input_embeddings(new) if way == "set" else setattr(model.model, "embed_tokens", new)
    else:
        new = kind(model.get_output_embeddings())
        model.set_output_embeddings(new) if way == "set" else setattr(model, "lm_head", new)


def worst(model: Any, whole: Any, ids: torch.Tensor = PROMPTS) -> float:
    """The largest relative difference of logits, loss and gradients."""
    losses = [each(ids, labels=ids).loss for each in (model, whole)]
    for loss in losses:
        loss.backward()
    logits = (each(ids).logits.detach() for each in (model, whole))
    return max(relative(*losses), relative(*logits), *gradient_differences(model, whole).values())


@pytest.mark.parametrize("options", wide([{}, {"tp_loss_parallel": True}], 1))
@on_ranks(2)
def test_a_module_around_an_embedding_or_a_head(folder, options) -> None:
    for kind, way in product((Soft, Hashed, Tempered, Mixed), ("set", "assign")):
        model, whole = load_both(folder, **options)
        assert relative(*(each(PROMPTS, labels=PROMPTS).loss for each in (model, whole))) < TOLERANCE  # before, too
        for each in (model, whole):
            put(each, kind, way)
        assert worst(model, whole) < TOLERANCE, (kind, way)
        assert full_parameters(model).keys() == dict(whole.named_parameters()).keys()


FEW, FEW_TOO = ((False, 2), (True, 1)), ((False, 1), (True, 2))
"""Whether a model's embeddings are tied, and their rows."""


def few_rows(folder: str, scratch: str, few: Any, options: dict[str, bool]) -> None:
    """Run on every rank: models with fewer rows than ranks, by the checkpoint or by a resize; saves are equal."""
    for tied, rows in few:
        for name, place in (("loaded", f"{scratch}/{tied}-{rows}"), ("resized", folder)):
            model, whole = load_both(place, **options)
            if name == "resized":
                for each in (model, whole):
                    torch.manual_seed(0)
                    each.resize_token_embeddings(rows)
            assert worst(model, whole, PROMPTS % rows) < TOLERANCE, (name, rows, tied)
            model.save_pretrained(f"{scratch}/saved")
            dist.barrier()
            saved = LlamaForCausalLM.from_pretrained(f"{scratch}/saved").state_dict()
            assert all(torch.equal(saved[key], value) for key, value in whole.state_dict().items())
            dist.barrier()


@needs("full_parameters", "invariant")
@pytest.mark.parametrize(
    ("few", "options"),
    wide([(few, options) for options in ({}, {"tp_invariant": True}) for few in (FEW, FEW_TOO)], 1),
)
def test_fewer_rows_than_ranks(pool, cases, tmp_path, few, options) -> None:
    for tied, rows in few:
        names = {"bos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": tied}
        config = llama_config(9, 3, vocab_size=rows, **names)
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"{tied}-{rows}")
    pool.run(3, few_rows, cases(9, 3).folder, str(tmp_path), few, options)
