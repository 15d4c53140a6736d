"""What Inductor makes of a tensor-parallel model on a CPU: decoding, training, sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from transformers import CompileConfig

import tp_transformers
from tests.support.comparisons import relative
from tests.support.models import PROMPTS, load_both
from tests.support.pool import Pool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOLERANCE = 1e-4  # fp32 sums in another order
GRADIENT_TOLERANCE = 1e-3


def load_to_compile(folder: str, **options: Any) -> tuple[Any, Any]:
    """(the model on ranks, the model of one process)."""
    torch._inductor.config.compile_threads = 1  # more are processes that each import torch
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return load_both(folder, **options)


def decode(folder: str) -> dict[str, Any]:
    """Run on every rank: a prompt and its tokens, with a static cache that Inductor compiles for."""
    model, plain = load_to_compile(folder)
    config = CompileConfig(backend="inductor", mode="default")
    config._compile_all_devices = True
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = plain.generate(PROMPTS, **options)
    result: dict[str, Any] = {"error": 0.0, "tokens": True}
    for prompts, own in ((PROMPTS, expected), (PROMPTS[:1, :4], plain.generate(PROMPTS[:1, :4], **options))):
        seen = model.generate(prompts, cache_implementation="static", compile_config=config, **options)
        result["tokens"] &= torch.equal(seen.sequences, own.sequences)
        result["error"] = max(result["error"], relative(torch.stack(seen.logits), torch.stack(own.logits)))
    return {**result, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def step(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run on every rank: logits and gradients of a compiled model, at two lengths."""
    model, plain = load_to_compile(folder, **options)
    compiled = torch.compile(model, backend="inductor")
    result: dict[str, Any] = {"error": 0.0, "grads": 0.0, "missing": set()}
    for batch in (PROMPTS, PROMPTS[:, :5].contiguous()):
        outputs, expected = compiled(batch, labels=batch), plain(batch, labels=batch)
        for each, out in ((model, outputs), (plain, expected)):
            each.zero_grad()
            out.loss.backward()
        result["error"] = max(result["error"], relative(outputs.logits.detach(), expected.logits.detach()))
        for name, param in plain.named_parameters():
            own = model.get_parameter(name)
            if own.grad is None:
                result["missing"].add(name)
            else:
                whole = tp_transformers.full_tensor(own, own.grad)
                result["grads"] = max(result["grads"], relative(whole, param.grad))
    return {**result, "breaks": dict(torch._dynamo.utils.counters["graph_break"])}


@pytest.mark.parametrize("heads", [(8, 4), (9, 3)])
def test_decoding_with_a_static_cache(pool: Pool, cases: Any, heads: tuple[int, int]) -> None:
    for result in pool.run(2, decode, cases(*heads, num_hidden_layers=1).folder):
        assert result["graphs"] > 0
        assert result["tokens"]
        assert result["error"] < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"tp_sequence_parallel": True}], ids=["plain", "sequence parallel"])
def test_a_training_step(pool: Pool, cases: Any, options: dict[str, Any]) -> None:
    for result in pool.run(2, step, cases(8, 4, num_hidden_layers=1).folder, options):
        assert not result["breaks"]
        assert not result["missing"]
        assert result["error"] < TOLERANCE
        assert result["grads"] < GRADIENT_TOLERANCE
