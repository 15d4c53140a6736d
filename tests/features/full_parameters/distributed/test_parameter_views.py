"""Views and copies of parameters that are shards, held against those of the full tensors in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.comparisons import (
    different_tensors,
    full_parameters,
    gradient_differences,
    parameter_differences,
    relative,
)
from tests.support.models import PROMPTS, load, load_both
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import TensorParallelError, full_tensor

NAMES = ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.gate_proj.weight", "lm_head.weight")
TOLERANCE = 1e-4
"""fp32 sums in another order."""
BOTH = wide([((9, 3),), ((8, 4),)], 2)
"""Heads of plain shards, and of DTensors."""
EITHER = wide([((9, 3),), ((8, 4),)], 1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "half of the rows": lambda w: w.data[: len(w) // 2].fill_(1.0),
    "a row": lambda w: w[0].zero_(),
    "a flat view": lambda w: w.detach().view(-1).__setitem__(3, 0),
    "transposed": lambda w: w.detach().T.add_(1),
    "lists": lambda w: torch._foreach_zero_([w.data[0], w.data[1]]),
    "out=": lambda w: torch.add(torch.ones(w.shape[1]), 1, out=w.data[0]),
    "an activation": lambda w: nn.functional.relu(w.detach()[1], inplace=True),
    "initial values": lambda w: nn.init.normal_(w.data[-3:], std=0.02),
    "initial ones": lambda w: nn.init.eye_(w.data[:4]),
    "by value": lambda w: w.detach()[0].apply_(lambda value: value + 1),
    "in inference": torch.inference_mode()(lambda w: w.data[2].zero_()),
    "an activation in inference": torch.inference_mode()(lambda w: nn.functional.relu(w.detach()[1], inplace=True)),
}


@pytest.mark.parametrize("heads", BOTH)
@on_ranks(num_hidden_layers=1)
def test_writes_to_views_are_refused(folder) -> None:
    """Each raises, names `full_parameters`, and leaves the parameter."""
    model = load(folder)
    for name in NAMES:
        param = model.get_parameter(name)
        before = full_tensor(param)
        for kind, write in WRITES.items():
            with pytest.raises(TensorParallelError, match=r"a write to a gathered copy.*full_parameters\(model\)"):
                write(param)
            assert torch.equal(full_tensor(param), before), (kind, name)
        array = param.detach().numpy()
        with pytest.raises(ValueError, match="read-only"):
            np.multiply(array, 2, out=array)
        view = param.detach().T
        torch.save(view, buffer := io.BytesIO())
        buffer.seek(0)
        for copied in (copy.deepcopy(view), torch.load(buffer)):
            assert type(copied) is Tensor
            assert torch.equal(copied, before.T), name


def inits(w: Tensor) -> None:
    torch.manual_seed(3)
    for init in (nn.init.normal_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.xavier_uniform_):
        init(w)
    nn.init.sparse_(w, 0.5)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda w: w.data.__setitem__(0, 1),
    "elements of rows": lambda w: w.data.__setitem__((slice(-2, None), 3), w.data[-2:, 3] + 2),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([2, 4]), torch.ones(2, w.shape[1])),
    "index_fill_": lambda w: w.index_fill_(1, torch.tensor([0]), 0.5),
    "by value": lambda w: w.detach().apply_(lambda value: value + 1),
    "all elements": lambda w: w.mul_(2).clamp_(-1, 1),
    "copy_": lambda w: w.copy_(torch.arange(w.numel()).view(w.shape) + w),
    "initial values": inits,
}


@pytest.mark.parametrize("heads", EITHER)
@on_ranks(num_hidden_layers=1)
@torch.no_grad()
def test_changes_of_parameters_are_those_of_the_full_tensor(folder) -> None:
    model = load(folder)
    for name in NAMES:
        param = model.get_parameter(name)
        for kind, change in CHANGES.items():
            full = nn.Parameter(full_tensor(param).clone())
            change(full)
            change(param)
            torch.testing.assert_close(full_tensor(param), full.detach(), rtol=1e-5, atol=1e-5, msg=f"{kind} {name}")


@on_ranks()
def test_a_parameter_that_is_read_again_is_not_changed(folder) -> None:
    """The gradient through a frozen head that is read for every chunk, and kept."""
    grads = []
    for model in load_both(folder):
        weight = model.lm_head.weight.requires_grad_(False)
        with torch.inference_mode():
            view = weight.T
        assert relative(weight.detach().T, view) == 0
        hidden = torch.ones(4, weight.shape[1], requires_grad=True)
        loss = sum((chunk @ weight.T).square().sum() for chunk in hidden.chunk(2))
        assert torch.equal(weight.data, weight.data)
        loss.backward()
        grads.append(hidden.grad)
    assert relative(*grads) < TOLERANCE


@pytest.mark.parametrize("heads", EITHER)
@on_ranks()
def test_copies_of_values_and_full_ones_in_their_place(folder) -> None:
    """Copies of values that go back, state dicts, and a replaced embedding."""
    model = load(folder)
    model(PROMPTS).logits.sum().backward()
    copied = copy.deepcopy(model)
    assert all(param.grad is None for param in copied.parameters())

    twins = [(param, copy.copy(param)) for param in model.parameters()]
    assert all(isinstance(twin, nn.Parameter) and torch.equal(twin, param) for param, twin in twins)

    fulls = full_parameters(model)
    best = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.load_state_dict(best)
    assert different_tensors(full_parameters(model), fulls) == []

    state = model.state_dict()
    for name, full in fulls.items():
        assert state[name].shape == full.shape == state[name].size()
        assert torch.allclose(state[name].norm(), full.norm())
        assert torch.equal(full_tensor(model.get_parameter(name), (state[name] + full) / 2), full)

    with torch.no_grad():
        logits = model(PROMPTS).logits
        model.model.embed_tokens.weight = nn.Parameter(fulls["model.embed_tokens.weight"])
        assert relative(model(PROMPTS).logits, logits) < TOLERANCE


def penalty(model: Any) -> Tensor:
    """Backward of a penalty on the norm of gradients; returns it."""
    params = [model.get_parameter(name) for name in NAMES]
    grads = torch.autograd.grad(model(PROMPTS).logits.square().mean(), params, create_graph=True)
    value = sum(grad.pow(2).sum() for grad in grads) + torch.cat([grad.reshape(-1) for grad in grads]).norm()
    value.backward()
    return value.detach()


@pytest.mark.parametrize("heads", BOTH)
@on_ranks(num_hidden_layers=1)
def test_a_penalty_on_gradients_is_that_of_one_process(folder) -> None:
    model, alone = load_both(folder, attn_implementation="eager")
    assert relative(penalty(model), penalty(alone)) < TOLERANCE
    assert max(gradient_differences(model, alone).values()) < TOLERANCE


class Counting(torch.optim.SGD):
    """Keeps a table of the size of the first rows, which is no shard, and needs complete parameters."""

    tp_scope = "parameter"

    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            table = self.state[param].setdefault("table", torch.zeros(self.rows, param.shape[1]))
            table += 1
        super().step(closure)


@on_ranks(heads=(8, 4))
def test_a_whole_state_is_not_taken_for_a_shard_of_a_dtensor(folder) -> None:
    """A state of an optimizer that has the shape of one rank's shard."""
    head = load(folder).lm_head.weight
    optimizer = Counting([head], lr=0.1)
    optimizer.rows = head.shape[0] // 2  # type: ignore[attr-defined]
    for _ in range(3):
        head.grad = torch.zeros_like(head)
        optimizer.step()
    assert optimizer.state[head]["table"].unique().tolist() == [3.0]


@pytest.mark.parametrize("heads", BOTH)
@on_ranks()
def test_states_may_be_those_of_one_process(folder) -> None:
    """A step of AdamW with the states of one process."""
    model, alone = load_both(folder)
    torch.manual_seed(0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone)]
    for param, mine in zip(alone.parameters(), model.parameters(), strict=True):
        param.grad = torch.randn_like(param)
        mine.grad = param.grad.clone()
        for optimizer, each in zip(optimizers, (mine, param), strict=True):
            averages = {"exp_avg": torch.ones(each.shape), "exp_avg_sq": torch.ones(each.shape)}
            optimizer.state[each].update(step=torch.tensor(3.0), **averages)
    for optimizer in optimizers:
        optimizer.step()
    assert max(parameter_differences(model, alone).values()) < TOLERANCE


@on_ranks()
def test_a_gradient_keeps_its_graph_as_in_one_process(folder) -> None:
    """Gradients that are assigned with a graph, one of the full shape."""
    weight = load(folder).get_parameter(NAMES[1])
    for shape in (weight.shape, weight.tp_shard.local_shape):
        weight.grad = torch.ones(shape, requires_grad=True) * 2
        assert weight.grad.requires_grad
