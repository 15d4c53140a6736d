"""Assisted decoding on several ranks: the tokens of one process, and as many right drafts in every step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, CompileConfig, GenerationMixin
from transformers.generation import stopping_criteria

from tests.support.models import llama_config, load
from tests.support.tiers import wide

IN_STATIC = Version(transformers.__version__) >= Version("5.24")
"""True if transformers itself drafts with a static cache, and compiles the forward that checks the drafts."""
LOOKS_UP = Version(transformers.__version__) >= Version("5.16")
"""True if prompt lookup works without an end token, as here."""
NEW = 24
PROMPT = {"inputs": torch.tensor([[23, 9, 41, 198, 3, 77, 12, 23, 9, 41]]), "max_new_tokens": NEW}
SEEDED = {"do_sample": True, "temperature": 0.7}
EXACT = {"dtype": torch.float64}


def write(folder: Path, draft: Path, heads: int, kv_heads: int) -> None:
    """A model that repeats itself, and one whose drafts are right now and then: the first layer with some noise."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(heads, kv_heads)).double()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.5)
        for name, param in model.named_parameters():
            if ".mlp." in name or ".self_attn." in name:
                param.mul_(0.3)
    model.save_pretrained(folder)
    model.config.num_hidden_layers = 1
    model.model.layers = model.model.layers[:1]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    model.save_pretrained(draft)


@contextmanager
def steps() -> Iterator[list[tuple[int, int]]]:
    """(drafted, accepted) tokens of each step of the outer `generate`."""
    found: list[tuple[int, int]] = []
    original = GenerationMixin._get_candidate_generator

    def generator(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        update = made.update_candidate_strategy

        def note(ids: torch.Tensor, scores: torch.Tensor, matches: int) -> Any:
            found.append((scores.shape[1] - 1, int(matches)))
            return update(ids, scores, matches)

        made.update_candidate_strategy = note
        return made

    with mock.patch.object(GenerationMixin, "_get_candidate_generator", generator):
        yield found


def generated(model: Any, seed: int, **settings: Any) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Tokens, drafts, and the random state after them."""
    assistant = settings.get("assistant_model")
    if assistant is not None:  # the number of drafts is kept in the config of the assistant, from call to call
        assistant.generation_config.num_assistant_tokens = 4
        assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    torch.manual_seed(seed)
    with steps() as found:
        tokens = model.generate(**{**PROMPT, "do_sample": False, **settings})
    return tokens[0].tolist(), found, torch.get_rng_state().tolist()


STATIC = {"cache_implementation": "static", "max_cache_len": 48}
"""Longer than the tokens: transformers looks up one too many for a cache that is full at the end."""


def ways(draft: Any, cache: str) -> dict[str, Mapping[str, Any]]:
    """Settings of `generate` by name, for a cache that is dynamic, static, or of a compiled model."""
    assisted, lookup = {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}
    if cache == "dynamic":
        looked_up = {"lookup": lookup, "drawn": {**lookup, **SEEDED}} if LOOKS_UP else {}
        return {"greedy": assisted, "sampled": {**assisted, **SEEDED}} | looked_up
    if cache == "static":
        return {
            "greedy": {**assisted, **STATIC},
            "sampled": {**assisted, **SEEDED, **STATIC},
            "lookup": lookup | STATIC,
        }
    compiled = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    return {"greedy": {**assisted, **STATIC, "compile_config": compiled}}


def on_ranks(folder: str, draft: str, cache: str) -> list[dict[str, Any]]:
    """Run on every rank: by the way of drafting, with a whole and a sharded assistant."""
    seed, found = int(os.environ["RANK"]), []  # only that of rank 0 counts
    ours = load(folder, **EXACT)
    for assistant in (AutoModelForCausalLM.from_pretrained(draft, **EXACT), load(draft, **EXACT)):
        torch._dynamo.reset()
        found.append({name: generated(ours, seed, **settings) for name, settings in ways(assistant, cache).items()})
        if cache == "compiled":
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return found


CACHES = [(3, "dynamic"), (2, "static"), (2, "compiled"), (2, "dynamic"), (3, "static")]


@pytest.mark.parametrize(("size", "cache"), wide(CACHES if IN_STATIC else [(3, "dynamic"), (2, "dynamic")], 2))
def test_drafts_are_those_of_one_process(pool, tmp_path, size, cache) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    write(folder, draft, 9, 3)
    model, small = (AutoModelForCausalLM.from_pretrained(each, **EXACT) for each in (folder, draft))
    expected = {name: generated(model, 0, **settings) for name, settings in ways(small, cache).items()}
    plain = model.generate(**PROMPT, do_sample=False)[0].tolist()
    for name, (tokens, drafts, _) in expected.items():
        count, right = map(sum, zip(*drafts, strict=True))
        print(f"{cache}, {name}, {size} ranks: {right} of {count} drafts are right, {len(drafts)} steps, {NEW} tokens")
        assert 0 < right < count, drafts
        assert tokens == plain or name in ("sampled", "drawn")
    for whole, sharded in pool.run(size, on_ranks, str(folder), str(draft), cache, timeout=120):
        assert whole == sharded == expected


def drafts_by_other_clocks(folder: str, draft: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Run on every rank: by the clock of rank 1, which goes by a second when it is asked, the first token is late."""
    model, whole = load(folder, **EXACT), AutoModelForCausalLM.from_pretrained(draft, **EXACT)
    asked = iter(range(1000))
    now = (lambda: 0.0) if os.environ["RANK"] == "0" else (lambda: float(next(asked)))
    with mock.patch.object(stopping_criteria, "time", SimpleNamespace(time=now)):
        tokens, drafts, _ = generated(model, 0, assistant_model=whole, max_time=0.5)
    return tokens, drafts


def test_clocks_do_not_shorten_the_drafts_of_single_ranks(pool, tmp_path) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    write(folder, draft, 9, 3)
    model, small = (AutoModelForCausalLM.from_pretrained(each, **EXACT) for each in (folder, draft))
    tokens, drafts, _ = generated(model, 0, assistant_model=small)
    for found, steps_taken in pool.run(2, drafts_by_other_clocks, str(folder), str(draft), timeout=60):
        assert steps_taken == drafts[:1]  # and rank 1 stops the model after the first step
        assert found == tokens[: len(found)]
