"""Hooks of parameters that step an optimizer, or accumulate gradients, in the backward: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tp_transformers
from tests.support.comparisons import parameter_differences, relative
from tests.support.models import PROMPTS, load_both
from tests.support.on_ranks import on_ranks

pytestmark = pytest.mark.parametrize("heads", [(9, 3), (8, 4)])

TOLERANCE = 1e-4  # fp32 sums in another order


@on_ranks()
def test_an_optimizer_for_each_parameter_steps_in_the_backward(folder) -> None:
    models = load_both(folder)
    for model in models:
        optimizers = {param: torch.optim.AdamW([param], lr=1e-2, eps=1e-2) for param in model.parameters()}

        def take_step(param: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(take_step)
        for _ in range(3):
            model(PROMPTS, labels=PROMPTS).loss.backward()
    assert max(parameter_differences(*models).values()) < TOLERANCE


@on_ranks()
def test_hooks_accumulate_gradients(folder) -> None:
    models, sums = load_both(folder), list[dict[str, Tensor]]()
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
    assert len(sums[1]) > 10
    for name, expected in sums[1].items():
        found = tp_transformers.full_tensor(models[0].get_parameter(name), sums[0][name])
        assert relative(found, expected) < TOLERANCE, name
