"""Attention whose queries and outputs are linears of experts, in any number of KV heads, held against one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.architectures import cache_bytes, gradient_errors
from tests.support.models import (
    MASK,
    PROMPTS,
    assert_same_files,
    bytes_read,
    headers,
    held,
    load,
    relative,
    save_as_loaded,
)
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.tiny import MODELS
from tests.support.tiny_mixers import Mixing
from tp_transformers.infer.small.model import computing_in, convert
from tp_transformers.slices.layout import even_widths

pytestmark = pytest.mark.distributed

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


def observe(model: Any) -> dict[str, Any]:
    """What a model does with a left-padded batch, in numbers; its loss has a part that is a function of its routers."""
    convert(model, torch.float64)
    with computing_in(torch.float64):
        with torch.no_grad():
            answer = model(PROMPTS, attention_mask=MASK, output_attentions=True)
        made = model.generate(
            PROMPTS, attention_mask=MASK, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
        )
        model.aux_loss_coef = 1.0
        model.train()
        model(PROMPTS, attention_mask=MASK, labels=PROMPTS, output_router_logits=True).loss.backward()
        model.eval()
    return {
        "logits": answer.logits,
        "attentions": answer.attentions,
        "tokens": made.sequences,
        "cache": cache_bytes(made.past_key_values),
        "grads": {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
    }


def compare(folders: dict[int, str], saved: str, **options: Any) -> dict[int, dict[str, Any]]:
    """Run on every rank: the largest differences from one process."""
    found = {}
    for heads, folder in folders.items():
        model = load(folder, dtype=torch.float64, attn_implementation="eager", **options)
        read = bytes_read(model) - held(model) - headers(folder)
        seen, expected = observe(model), torch.load(Path(folder).parent / "reference.pt")
        model.save_pretrained(f"{saved}/{heads}")
        assert seen["grads"].keys() == expected["grads"].keys()
        pairs = zip(seen["attentions"], expected["attentions"], strict=True)
        found[heads] = {
            "logits": relative(seen["logits"], expected["logits"]),
            "attentions": max(relative(own, whole) for own, whole in pairs),
            "gradient": max(gradient_errors(model, seen["grads"], expected["grads"]).values()),
            "tokens": torch.equal(seen["tokens"], expected["tokens"]),
            "cache": seen["cache"] / expected["cache"],
            "read": read,
        }
    return found


def compare_on_sequences(folders: dict[int, str], saved: str) -> dict[int, dict[str, Any]]:
    """Run on every rank: `compare`, with activations cut along the sequence."""
    return compare(folders, saved, tp_sequence_parallel=True)


def make(path: Path, heads: Sequence[int]) -> dict[int, str]:
    """KV heads -> the folder of a model; what one process makes of it lies beside it."""
    folders = {}
    for count in heads:
        folder = path / str(count)
        save_as_loaded(JETMOE.make(count, 3), folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "checkpoint", attn_implementation="eager", dtype=torch.float64
        )
        torch.save(observe(model.eval()), folder / "reference.pt")
        folders[count] = str(folder / "checkpoint")
    return folders


@pytest.mark.parametrize(("size", "heads"), wide([(3, (8,)), (3, (3, 4)), (2, (8, 3)), (4, (8, 3, 4))], 1))
def test_linears_of_experts_make_queries(pool: Pool, tmp_path: Path, size: int, heads: tuple[int, ...]) -> None:
    folders = make(tmp_path, heads)
    results = pool.run(size, compare, folders, str(tmp_path / "saved"))
    for count, folder in folders.items():
        for seen in (result[count] for result in results):
            assert max(seen["logits"], seen["attentions"], seen["gradient"]) < TOLERANCE, (count, seen)
            assert seen["tokens"], count
            assert seen["read"] == 0, count
        kept = [result[count]["cache"] for result in results]
        # With more ranks than KV heads, every rank has all keys and values.
        assert kept == pytest.approx(
            [width / count for width in even_widths(count, size)] if count >= size else [1.0] * size
        )
        assert_same_files(folder, str(tmp_path / "saved" / str(count)))


@pytest.mark.slow
def test_linears_of_experts_on_parts_of_the_sequence(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(3, compare_on_sequences, make(tmp_path, HEADS), str(tmp_path / "saved")):
        for heads, seen in result.items():
            assert max(seen["logits"], seen["gradient"]) < TOLERANCE, heads
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


@pytest.mark.parametrize("name", wide(["codegen", "diffllama"], 1))
def test_attentions_of_heads_in_blocks_are_in_the_order_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    save_as_loaded(MODELS[name].make(), tmp_path)
    for found in pool.run(2, compare_attentions, str(tmp_path / "checkpoint")):
        assert max(found) < 1e-4
