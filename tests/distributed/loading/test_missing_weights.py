"""Checkpoints that do not match the model one to one: missing, tied and mismatched weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

import tp_transformers
from tests.support.comparisons import equal_parameters, relative
from tests.support.models import PROMPTS, VOCAB, bytes_read, edited, headers, load

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order


def missing_head(folder: str) -> dict[str, Any]:
    # Ranks seed differently on purpose: rank 0's draw is what counts.
    torch.manual_seed(5 + int(os.environ["RANK"]))
    model, info = load(folder, AutoModelForSequenceClassification, output_loading_info=True, num_labels=5)
    torch.manual_seed(5)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "equal": torch.equal(tp_transformers.full_tensor(model.score.weight), plain.score.weight),
        "kind": type(model.score.weight).__name__,
    }


def test_missing_weights_are_initialised_as_one_process_would(pool: Any, cases: Any) -> None:
    for result in pool.run(2, missing_head, cases(8, 4).folder):
        assert result["missing"] == ["score.weight"]
        assert result["unexpected"] == ["lm_head.weight"]
        assert result["equal"]
        assert result["kind"] == "Parameter"  # held whole on every rank


def missing_sharded(folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        error = relative(model(PROMPTS).logits, plain(PROMPTS).logits)
    return {
        "missing": sorted(info["missing_keys"]),
        "equal": equal_parameters(model, plain),
        "error": error,
    }


def test_missing_sharded_weights_too(pool: Any, cases: Any, tmp_path: Path) -> None:
    names = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
    folder = edited(cases(9, 3).folder, tmp_path / "c", lambda tensors: [tensors.pop(name) for name in names])
    for result in pool.run(3, missing_sharded, folder):
        assert result["missing"] == names
        assert result["equal"]
        assert result["error"] < TOLERANCE


def tied(folder: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model, info = load(folder, output_loading_info=True)
    torch.manual_seed(3)
    plain, plain_info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        error = relative(model(PROMPTS).logits, plain(PROMPTS).logits)
    params = list(model.parameters())
    return {
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "plain tied": plain.lm_head.weight is plain.model.embed_tokens.weight,
        "missing": sorted(info["missing_keys"]) == sorted(plain_info["missing_keys"]),
        "error": error,
        "read": bytes_read(model),
        "local": sum(tp_transformers.local_tensor(p).nbytes for p in params),
    }


@pytest.mark.parametrize("kind", ["source only", "target only", "both equal", "both different", "neither"])
def test_tied_embeddings(pool: Any, cases: Any, tmp_path: Path, kind: str) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind not in ("source only", "neither"):
            tensors[head] = tensors[embed].clone()
        if kind in ("target only", "neither"):
            del tensors[embed]
        if kind == "both different":
            tensors[head][-1] += 1  # a row that only the last rank holds

    folder = edited(cases(8, 2, tie_word_embeddings=True).folder, tmp_path / "c", change)
    for result in pool.run(3, tied, folder):
        assert result["tied"] == result["plain tied"] == (kind != "both different")
        assert result["missing"]
        assert result["error"] < TOLERANCE
        if kind in ("source only", "target only"):
            assert result["read"] - headers(folder) == result["local"], "a tied weight is read once"


def mismatched(folder: str) -> dict[str, Any]:
    model, info = load(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    return {
        "mismatched": [(name, tuple(got), tuple(want)) for name, got, want in info["mismatched_keys"]],
        "shape": tuple(tp_transformers.full_tensor(model.lm_head.weight).shape),
        "finite": bool(torch.isfinite(model(PROMPTS).logits).all()),
    }


def shrink_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].clone()


def test_mismatched_sizes_can_be_ignored(pool: Any, cases: Any, tmp_path: Path) -> None:
    folder = edited(cases(8, 4).folder, tmp_path / "c", shrink_head)
    for result in pool.run(2, mismatched, folder):
        assert result["mismatched"] == [("lm_head.weight", (10, 64), (VOCAB, 64))]
        assert result["shape"] == (VOCAB, 64)
        assert result["finite"]
