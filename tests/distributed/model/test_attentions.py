"""Attentions that a model returns have the heads of all ranks, where they have more dims, and whatever the lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.comparisons import relative
from tests.support.models import load
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

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


def test_local_attentions_have_all_heads(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LongT5Config(
        vocab_size=64, d_model=24, d_kv=8, num_heads=3, d_ff=32, num_layers=2, local_radius=3, decoder_start_token_id=0
    )
    transformers.LongT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    expected = attentions(str(tmp_path), tp_plan=None)
    assert {weights.ndim for weights in expected} == {4, 5}
    for found in pool.run(2, attentions, str(tmp_path)):
        assert max(relative(own, weights) for own, weights in zip(found, expected, strict=True)) < 1e-5
