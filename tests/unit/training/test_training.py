"""What training needs, as far as one process can tell."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from transformers import LlamaForCausalLM

import tp_transformers
from tests.support.models import load
from tests.support.needs import needs
from tp_transformers.model.clip import _norm_of_full
from tp_transformers.model.dropout import OwnRandomness
from tp_transformers.strategies import ColwiseParallel, RowwiseParallel


@needs("dcp")
def test_groups_keep_their_settings_and_every_parameter() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = tp_transformers.training.parameter_groups(
        [{"params": weights[:2], "lr": 1.0}, {"params": weights[2], "lr": 2.0}]
    )
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 1.0), (1, 2.0)]
    (group,) = tp_transformers.training.parameter_groups(iter(weights))
    assert group["params"] == weights
    assert tp_transformers.training.parameter_groups([]) == []


@needs("dcp")
def test_optimizer_states_of_empty_groups_and_unused_parameters(tmp_path) -> None:
    def make(groups: Callable[[Any], list[dict[str, Any]]]) -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        return model, torch.optim.AdamW(groups(model))

    def saved(model: Any) -> list[dict[str, Any]]:
        bias = {"params": [model.bias], "weight_decay": 0.0}
        return [{"params": []}, {"params": [model.weight]}, {"params": []}, bias]

    def with_another(model: Any) -> list[dict[str, Any]]:
        model.added = nn.Parameter(torch.ones(2))
        return [{"params": [*model.parameters()]}]

    def load(groups: Callable[[Any], list[dict[str, Any]]]) -> torch.optim.Optimizer:
        model, optimizer = make(groups)
        state = tp_transformers.training.optimizer_state_dict(model, optimizer)
        tp_transformers.checkpoint.load_distributed_checkpoint(state, tmp_path)
        tp_transformers.training.load_optimizer_state_dict(model, optimizer, state)
        return optimizer

    model, optimizer = make(saved)
    model.weight.sum().backward()
    optimizer.step()
    dcp.save(tp_transformers.training.optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    expected, found = optimizer.state_dict(), load(saved).state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys() == {0}
    torch.testing.assert_close(found["state"][0], expected["state"][0], rtol=0, atol=0)

    with pytest.raises(tp_transformers.CheckpointError, match=r"weight_decay of .* 0.01 for weight and 0.0 for b"):
        load(lambda model: [{"params": [model.weight, model.bias]}])
    with pytest.raises(tp_transformers.CheckpointError, match="got none of added, expected one of every parameter"):
        load(with_another)


@needs("dcp")
def test_a_model_without_a_plan_is_refused_or_left_to_torch() -> None:
    plain: Any = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 100.0)
    assert tp_transformers.clip_grad_norm_(plain, 100.0) == expected
    assert tp_transformers.clip_grad_norm_(plain.weight, 100.0) == plain.weight.grad.norm()
    for function in (tp_transformers.debug.check_inputs, lambda model: tp_transformers.data_parallel(model, None)):  # type: ignore[arg-type]
        with pytest.raises(tp_transformers.UnsupportedError, match="loaded with tp_plan"):
            function(plain)


def test_clipping_on_one_rank_is_torchs(cases) -> None:
    grads = []
    for plan in ("auto", None):
        model = load(cases(9, 3).folder, LlamaForCausalLM, tp_plan=plan)
        model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        clip = tp_transformers.clip_grad_norm_ if plan else torch.nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), 0.5, foreach=False)  # type: ignore[operator]
        grads.append((norm, *(param.grad for param in model.parameters())))
        next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0"):
            clip(model.parameters(), 0.5, error_if_nonfinite=True)  # type: ignore[operator]
    for mine, theirs in list(zip(*grads, strict=True))[2:]:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("seed", range(8))
def test_norms_are_added_up_in_the_order_of_torch(seed) -> None:
    """Every bit of the norm of gathered gradients is torch's, also where dtypes are mixed."""
    torch.manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32] * 3
    params = [nn.Parameter(torch.randn(7, 9, dtype=dtype)) for dtype in dtypes]
    grads = [torch.randn_like(param) for param in params]
    norm = _norm_of_full(params, grads, 2.0, torch.device("cpu"))
    assert torch.equal(norm, nn.utils.get_total_norm(grads, 2.0))


class Block(nn.Module):
    """A layer that is cut, a dropout, and one that takes what is cut."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.column, self.row, self.p, self.dropout = nn.Identity(), nn.Identity(), 0.5, 0.5
        self.column.tp_strategy, self.row.tp_strategy = ColwiseParallel(), RowwiseParallel()  # type: ignore[assignment]
        OwnRandomness(rank, torch.device("cpu")).attach(self)
        self.fails = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = nn.functional.dropout(self.column(x), 0.5, self.training)
        if self.fails:
            raise ValueError("stopped")
        return inside, nn.functional.dropout(self.row(x), 0.5, self.training)


def test_ranks_draw_alike_outside_and_not_inside() -> None:
    x, states, seen = torch.ones(1000), [], []
    for rank in range(3):
        torch.manual_seed(3)
        block = Block(rank)
        seen.append([mask for _ in range(2) for mask in block(x)])
        states.append(torch.get_rng_state())
        start = torch.get_rng_state()
        block.fails = True
        with pytest.raises(ValueError, match="stopped"):
            block(x)
        block.fails = False
        after = torch.get_rng_state()
        torch.set_rng_state(start)
        again = block(x)
        torch.set_rng_state(start)
        assert all(torch.equal(a, b) for a, b in zip(again, block(x), strict=True)), "nothing but the state counts"
        assert not torch.equal(start, after)
    assert all(torch.equal(state, states[0]) for state in states)
    inside = [masks[0] for masks in seen]
    assert not torch.equal(inside[0], inside[1])
    assert not torch.equal(inside[1], inside[2])
    assert abs((inside[0] * inside[1]).mean().item() - 1) < 0.2  # and independent: half of a half, scaled by four
    assert all(torch.equal(masks[1], seen[0][1]) and torch.equal(masks[3], seen[0][3]) for masks in seen)
    block = Block(0).eval()
    start = torch.get_rng_state()
    block(x)
    assert torch.equal(torch.get_rng_state(), start), "nothing is drawn where nothing is dropped"


def test_a_device_draws_from_its_own_generator(monkeypatch) -> None:
    generator, device, rand = torch.Generator(), torch.device("meta"), torch.rand
    module = SimpleNamespace(default_generators=[generator], current_device=lambda: 0)
    drawn: list[torch.device] = []

    def draw(*size: Any, device: torch.device) -> torch.Tensor:
        drawn.append(device)
        return rand(*size, generator=generator)

    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "rand", draw)
    seeds = []
    for rank, seed in ((0, 3), (0, 3), (1, 3), (0, 4)):
        torch.manual_seed(rank)  # the CPU's generator does not count, and does not go on
        before = torch.get_rng_state()
        generator.manual_seed(seed)
        own = OwnRandomness(rank, device)
        own.draws = True
        states, used = [], []
        for _ in range(2):
            own.enter()
            used.append(generator.initial_seed())
            own.leave()
            states.append(generator.get_state())
        assert not torch.equal(*states), "the shared state goes on"
        assert torch.equal(torch.get_rng_state(), before)
        assert len(set(used)) == 2
        seeds.append(used)
    assert seeds[0] == seeds[1]
    assert seeds[0] != seeds[2]
    assert seeds[0] != seeds[3]
    assert drawn == [device] * 8


class Adapter(nn.Module):
    """As LoRA's layers are: it drops some of the whole input, after the layer that it is around."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base_layer(x)
        self.mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        return x


def test_an_adapter_that_comes_after_a_step_drops_alike() -> None:
    masks = []
    for rank in range(2):
        torch.manual_seed(3)
        block = Block(rank)
        block(torch.ones(100))
        block.column = Adapter(block.column)
        inside, _ = block(torch.ones(100))
        masks.append((block.column.mask, inside, torch.get_rng_state()))
    (one, first, state), (other, second, same) = masks
    assert torch.equal(one, other)
    assert torch.equal(state, same)
    assert not torch.equal(first, second)
