"""Attentions that a model returns have the heads of all ranks: of every type, and whatever the lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.comparisons import relative, relative_errors
from tests.support.models import load, save_as_loaded
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.tiny import MODELS, model_class

LENGTHS = (4, 8, 11)
"""One, two and three blocks of four tokens, on ranks with two heads and one."""


def attentions(folder: str, **plan: Any) -> list[torch.Tensor]:
    """Run on every rank: attention weights of every layer of an encoder that attends in blocks, and of its decoder."""
    auto = transformers.AutoModelForSeq2SeqLM
    model = load(folder, auto=auto, attn_implementation="eager", **plan)
    found: list[torch.Tensor] = []
    for length in LENGTHS:
        ids = torch.arange(3, 3 + length)[None]
        with torch.no_grad():
            made = model(ids, decoder_input_ids=ids, output_attentions=True)
        found += [*made.encoder_attentions, *made.decoder_attentions, *made.cross_attentions]
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of nested outputs, with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(entry, f"{name}.{key}")


FIRST = ["blip_2_qformer", "jetmoe"]
NAMES = [*FIRST, *(name for name in MODELS if name not in (*FIRST, "llama4_vision_model"))]
"""All types but one, which raises in one process, too."""


@needs("shares")
@pytest.mark.parametrize("name", wide(NAMES, len(FIRST)))
@on_ranks()
def test_attentions_of_a_type_have_all_heads(tiny, name) -> None:
    found = []
    for plan in ({"tp_plan": None}, {"tp_shares": [2, 1]}):
        model = load(tiny, model_class(MODELS[name]), attn_implementation="eager", **plan).eval()
        with torch.no_grad():
            output = model(**MODELS[name].inputs(), output_attentions=True)
        found.append({name: value for name, value in leaves(dict(output)) if "attention" in name})
    errors = relative_errors(found[1], found[0])
    assert all(error < 1e-4 for error in errors.values()), errors


@pytest.fixture
def tiny(tmp_path: Path, name: str) -> str:
    """A small model of a type."""
    if not MODELS[name].runs:
        pytest.skip("its code takes a part of the heads since a later release of transformers")
    save_as_loaded(MODELS[name].make(), tmp_path)
    return str(tmp_path / "checkpoint")


@on_ranks()
def test_local_attentions_have_all_heads(longt5) -> None:
    found, expected = attentions(longt5), attentions(longt5, tp_plan=None)
    assert {weights.ndim for weights in expected} == {4, 5}
    assert max(relative(own, weights) for own, weights in zip(found, expected, strict=True)) < 1e-5


@pytest.fixture
def longt5(tmp_path: Path) -> str:
    """An encoder that attends in blocks, and a decoder."""
    torch.manual_seed(0)
    config = transformers.LongT5Config(
        vocab_size=64, d_model=24, d_kv=8, num_heads=3, d_ff=32, num_layers=2, local_radius=3, decoder_start_token_id=0
    )
    transformers.LongT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    return str(tmp_path)
