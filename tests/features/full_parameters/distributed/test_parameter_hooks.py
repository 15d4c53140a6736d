"""Hooks of parameters that step an optimizer, or accumulate gradients, in the backward: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tp_transformers
from tests.support.comparisons import parameter_differences, relative
from tests.support.models import PROMPTS, load_both
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def in_backwards(folder: str) -> dict[str, float]:
    """Run on every rank: an optimizer for each parameter, which steps in the backward; and hooks that accumulate."""
    models = load_both(folder)
    for model in models:
        optimizers = {param: torch.optim.AdamW([param], lr=1e-2, eps=1e-2) for param in model.parameters()}

        def take_step(param: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        handles = [param.register_post_accumulate_grad_hook(take_step) for param in model.parameters()]
        for _ in range(3):
            model(PROMPTS, labels=PROMPTS).loss.backward()
        for handle in handles:
            handle.remove()
    found = {"weights": max(parameter_differences(*models).values())}

    sums: list[dict[str, Tensor]] = []
    for model in models:
        names, of_model = {param: name for name, param in model.named_parameters()}, {}

        def accumulate(param: Tensor, names: Any = names, of_model: Any = of_model) -> None:
            of_model[names[param]] = of_model.get(names[param], 0) + param.grad.double()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(accumulate)
        for prompts in PROMPTS.split(1):
            model(prompts, labels=prompts).loss.backward()
        sums.append(of_model)
    params = dict(models[0].named_parameters())
    for name, expected in sums[1].items():
        found[name] = relative(tp_transformers.full_tensor(params[name], sums[0][name]), expected)
    assert len(found) > 10
    return found


@pytest.mark.parametrize("heads", [(9, 3), (8, 4)])
def test_hooks_on_gradients_are_those_of_one_process(pool: Pool, cases: Any, heads: Any) -> None:
    for found in pool.run(2, in_backwards, cases(*heads).folder):
        assert max(found.values()) < 1e-4, {name: error for name, error in found.items() if error >= 1e-4}
