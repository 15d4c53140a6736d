"""What ranks tell each other before they generate, seen from one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tp_transformers.model import dropout
from tp_transformers.model import generate as generation


def test_the_state_of_the_models_device_goes_along(monkeypatch) -> None:
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
def test_a_static_cache_is_made_early_where_heads_are_counted_right(counted, own, fits) -> None:
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
