"""Attention whose queries and outputs are linears of experts, in any number of KV heads, held against one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.architectures import cache_bytes, compare_cases, in_float64
from tests.support.comparisons import assert_same_files, relative
from tests.support.groups import counts
from tests.support.models import MASK, PROMPTS, Case, load, save_as_loaded, save_reference
from tests.support.needs import needs
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tests.support.tiny_mixers import Mixing

HEADS = (8, 3)
"""KV heads; of each, a token has a query for every expert that it is sent to."""
JETMOE = Mixing(
    "JetMoe",
    lambda heads, experts: {
        "num_key_value_heads": heads,
        "num_attention_heads": 2 * heads,
        "kv_channels": 12,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    },
)
TOLERANCE = 1e-9  # float64: only the order of the sums differs
compare_eagerly = partial(compare_cases, attn_implementation="eager")  # the others return no attentions


@in_float64
def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers; its loss has a part that is a function of its routers."""
    with torch.no_grad():
        answer = model(PROMPTS, attention_mask=MASK, output_attentions=True)
    made = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    model.aux_loss_coef = 1.0
    model.train()
    model(PROMPTS, attention_mask=MASK, labels=PROMPTS, output_router_logits=True).loss.backward()
    model.eval()
    return {
        "outputs": {"logits": [answer.logits], "attentions": answer.attentions},
        "tokens": made.sequences,
        "bytes": {"cache": cache_bytes(made.past_key_values)},
    }


def make(path: Path, heads: Sequence[int]) -> dict[int, Case]:
    """Models by their KV heads."""
    cases = {}
    for count in heads:
        folder = path / str(count)
        save_as_loaded(JETMOE.make(count, 3), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "checkpoint", attn_implementation="eager", dtype=torch.float64
        )
        cases[count] = save_reference(observe(model.eval()), folder)
    return cases


@needs("verify")
@pytest.mark.parametrize(("size", "heads"), wide([(3, (8,)), (3, (3, 4)), (2, (8, 3)), (4, (8, 3, 4))], 1))
def test_linears_of_experts_make_queries(pool, tmp_path, size, heads) -> None:
    cases = make(tmp_path, heads)
    results = pool.run(size, compare_eagerly, cases, observe, str(tmp_path / "saved"))
    for count, case in cases.items():
        for seen in (result[count] for result in results):
            assert max(seen["logits"], seen["attentions"], seen["gradient"][1]) < TOLERANCE, (count, seen)
            assert seen["tokens"], count
            assert seen["read"] == 0, count
        kept = [result[count]["cache"] for result in results]
        # With more ranks than KV heads, every rank has all keys and values.
        assert kept == pytest.approx(
            [width / count for width in counts(count, size)] if count >= size else [1.0] * size
        )
        assert_same_files(case.folder, str(tmp_path / "saved" / str(count)))


@pytest.mark.slow
def test_linears_of_experts_on_parts_of_the_sequence(pool, tmp_path) -> None:
    compare = partial(compare_eagerly, tp_sequence_parallel=True)
    for result in pool.run(3, compare, make(tmp_path, HEADS), observe, str(tmp_path / "saved")):
        for heads, seen in result.items():
            assert max(seen["logits"], seen["gradient"][1]) < TOLERANCE, heads
            assert seen["tokens"], heads


def compare_attentions(folder: str) -> list[float]:
    """Run on every rank: the relative differences of the attentions of all layers from one process."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        own, whole = (
            model(PROMPTS, attention_mask=MASK, output_attentions=True).attentions
            for model in (load(folder, attn_implementation="eager"), plain)
        )
    return [relative(one, other) for one, other in zip(own, whole, strict=True)]


@needs("activations")
@pytest.mark.parametrize("name", wide(["codegen", "diffllama"], 1))
def test_attentions_of_heads_in_blocks_are_in_the_order_of_one_process(pool, tmp_path, name) -> None:
    save_as_loaded(MODELS[name].make(), tmp_path)
    for found in pool.run(2, compare_attentions, str(tmp_path / "checkpoint")):
        assert max(found) < 1e-4
