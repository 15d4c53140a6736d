"""What ranks tell each other before they generate, seen from one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.utils import ModelOutput

from tp_transformers.model import dropout
from tp_transformers.model import generate as generation

IDS = torch.tensor([[3, 5, 7]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IDS, IDS + 1),
        (IDS, IDS[0]),
        (IDS, IDS.int()),
        (IDS.float(), IDS.float() * (1 + 1e-6)),
        (IDS.bfloat16(), -IDS.bfloat16()),
        (IDS, torch.full((), 3)),
        (GenerationConfig(top_k=3), GenerationConfig(top_k=4)),
        ({"ids": [IDS]}, {"ids": [IDS + 1]}),
        (ModelOutput(last=IDS), ModelOutput(last=IDS + 1)),
        ([[3, 4]], [[3, 5]]),
        ({4, 3}, {4, 5}),
        (LogitsProcessorList([TopKLogitsWarper(3)]), LogitsProcessorList([TopPLogitsWarper(0.5)])),
        (DynamicCache(), DynamicCache(((IDS[None, None].float(), IDS[None, None].float()),))),
        (3, "3"),
        (1, True),
    ],
)
def test_fingerprints_differ_exactly_where_values_do(one: Any, other: Any) -> None:
    assert generation.fingerprint(one) != generation.fingerprint(other)
    for value in (one, other):
        assert generation.fingerprint(value) == generation.fingerprint(value)
    assert generation.fingerprint(IDS) == generation.fingerprint(IDS.clone().T.contiguous().T)


def test_the_state_of_the_models_device_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [torch.Generator().manual_seed(seed) for seed in (8, 9)]
    module = SimpleNamespace(default_generators=others, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.__getitem__)
    before, theirs = torch.get_rng_state(), [other.get_state() for other in others]
    for device in (torch.device("cuda", 1), torch.device("cuda")):
        shared = dropout.random_states(device)
        torch.rand(3)
        torch.rand(3, generator=others[1])
        dropout.set_random_states(device, shared)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(other.get_state(), state) for other, state in zip(others, theirs, strict=True))


@pytest.mark.parametrize(
    ("counted", "own", "fits"),
    [
        (2, {0: 2, 1: 2}, True),
        (2, {0: 2, 1: 1}, False),
        ([2, 1], {0: 2, 1: 1}, True),
        ([2, 2], {0: 2, 1: 1}, False),
        ([2, 1, 7], {0: 2, 1: 1}, True),  # the last keeps no keys and values
        ([2], {0: 2, 1: 1}, False),
        (2, {}, False),
        (None, {0: 2}, False),
    ],
)
def test_a_static_cache_is_made_early_where_heads_are_counted_right(counted: Any, own: Any, fits: bool) -> None:
    shape = None if counted is None else (counted, [8] * len(counted) if isinstance(counted, list) else 8)
    heads = {str(layer): SimpleNamespace(kv=SimpleNamespace(widths=(9, width))) for layer, width in own.items()}
    attributes = {
        "tp_group": SimpleNamespace(rank=1),
        "tp_resolution": SimpleNamespace(attention=heads),
        "get_submodule": lambda self, name: SimpleNamespace(layer_idx=int(name)),
    }
    base = type("Base", (), {"_get_static_cache_init_shape": lambda self: shape})
    model = type("Model", (generation.TensorParallelGeneration, base), attributes)()
    assert model._get_static_cache_init_shape() == (shape if fits else None)
