"""Checkpoints that do not match the model one to one: missing, tied and mismatched weights."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import equal_parameters, relative
from tests.support.models import PROMPTS, VOCAB, bytes_read, edited, headers, load
from tests.support.on_ranks import on_ranks

TOLERANCE = 1e-4  # fp32 sums in another order


@on_ranks(2, heads=(8, 4))
def test_missing_weights_are_initialised_as_one_process_would(folder) -> None:
    # Ranks seed differently on purpose: rank 0's draw is what counts.
    torch.manual_seed(5 + int(os.environ["RANK"]))
    model, info = load(folder, AutoModelForSequenceClassification, output_loading_info=True, num_labels=5)
    torch.manual_seed(5)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
    assert sorted(info["missing_keys"]) == ["score.weight"]
    assert sorted(info["unexpected_keys"]) == ["lm_head.weight"]
    assert torch.equal(tp_transformers.full_tensor(model.score.weight), plain.score.weight)
    assert type(model.score.weight).__name__ == "Parameter"  # held whole on every rank


def missing_sharded(folder: str, names: list[str]) -> None:
    """Run on every rank: the weights of some names are initialised."""
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert sorted(info["missing_keys"]) == names
    assert equal_parameters(model, plain)
    with torch.no_grad():
        assert relative(model(PROMPTS).logits, plain(PROMPTS).logits) < TOLERANCE


def test_missing_sharded_weights_too(pool, cases, tmp_path) -> None:
    names = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    folder = edited(cases(9, 3).folder, tmp_path / "c", lambda tensors: [tensors.pop(name) for name in names])
    pool.run(3, missing_sharded, folder, names)


def tied(folder: str, kind: str) -> None:
    """Run on every rank: the head is tied unless it is different, and is then read once."""
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain, plain_info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    for each in (model, plain):
        assert (each.lm_head.weight is each.model.embed_tokens.weight) == (kind != "both different")
    assert sorted(info["missing_keys"]) == sorted(plain_info["missing_keys"])
    with torch.no_grad():
        assert relative(model(PROMPTS).logits, plain(PROMPTS).logits) < TOLERANCE
    if kind in ("source only", "target only"):
        local = sum(tp_transformers.local_tensor(param).nbytes for param in model.parameters())
        assert bytes_read(model) - headers(folder) == local


@pytest.mark.parametrize("kind", ["source only", "target only", "both equal", "both different", "neither"])
def test_tied_embeddings(pool, cases, tmp_path, kind) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind not in ("source only", "neither"):
            tensors[head] = tensors[embed].clone()
        if kind in ("target only", "neither"):
            del tensors[embed]
        if kind == "both different":
            tensors[head][-1] += 1  # a row that only the last rank holds

    folder = edited(cases(8, 2, tie_word_embeddings=True).folder, tmp_path / "c", change)
    pool.run(3, tied, folder, kind)


def mismatched(folder: str) -> None:
    """Run on every rank: a head with fewer rows is reported, and made anew."""
    model, info = load(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    found = [(name, tuple(got), tuple(want)) for name, got, want in info["mismatched_keys"]]
    assert found == [("lm_head.weight", (10, 64), (VOCAB, 64))]
    assert tp_transformers.full_tensor(model.lm_head.weight).shape == (VOCAB, 64)
    assert torch.isfinite(model(PROMPTS).logits).all()


def shrink_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].clone()


def test_mismatched_sizes_can_be_ignored(pool, cases, tmp_path) -> None:
    folder = edited(cases(8, 4).folder, tmp_path / "c", shrink_head)
    pool.run(2, mismatched, folder)
