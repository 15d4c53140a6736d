"""What a step on gathered parameters owes besides the update: states, closures, hooks, failures, copies, averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.optimization import Adafactor

import tp_transformers
from tests.support.comparisons import (
    equal_parameters,
    full_parameters,
    parameter_differences,
    relative,
    relative_errors,
)
from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks, refused
from tests.support.optimizers import Comparison
from tests.support.tiers import wide
from tests.support.training import mesh_of
from tp_transformers import local_tensor

TOLERANCE = 1e-6  # the same gradients, and the same arithmetic on them

HEADS = wide([((9, 3),), ((8, 4),)], 2)


class Elementwise(torch.optim.AdamW):
    """An optimizer of a user's own, which says what it needs."""

    tp_scope = "shard"

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def matrices(model: Any) -> list[Tensor]:
    return [param for param in model.parameters() if param.ndim == 2]


def schedule_free(model: nn.Module) -> Any:
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, eps=1e-2)
    optimizer.train()  # which leaves an empty state for each parameter
    return optimizer


MAKERS: dict[str, Any] = {
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "transformers' Adafactor": lambda model: Adafactor(model.parameters(), beta1=0.9),
    "Elementwise": lambda model: Elementwise(model.parameters(), eps=1e-2),
    "schedule-free AdamW": schedule_free,
}
SAVED = ("Muon", "Adafactor", "transformers' Adafactor", "schedule-free AdamW")


# -- updates


@needs("debug")
@pytest.mark.parametrize(("size", "heads"), wide([(3, (9, 3)), (2, (8, 4)), (2, (9, 3)), (3, (8, 4))], 1))
@on_ranks(num_hidden_layers=1)
def test_updates_and_states_are_those_of_one_process(folder) -> None:
    """Updates, with a closure too, and states."""
    comparison, result = Comparison(folder), {}
    names = [name for name, _ in comparison.model.named_parameters()]
    of = dict(zip(comparison.model.parameters(), names, strict=True))
    for name, make in MAKERS.items():
        result[name] = comparison.of(make)
        if name in SAVED:
            result[f"{name}, closure"] = comparison.of(make, closure=True)
    for name in SAVED:
        comparison.restart()
        optimizer, reference = comparison.optimizers(MAKERS[name])
        comparison.step(optimizer, reference)
        expected = dict(zip(comparison.plain.parameters(), names, strict=True))
        states = {expected[param]: state for param, state in reference.state.items()}
        for param, state in optimizer.state.items():
            for key, value in state.items():
                whole = states[of[param]][key]
                if isinstance(value, Tensor) and whole.shape == tp_transformers.full_tensor(param).shape:
                    assert isinstance(value, DTensor) == isinstance(param, DTensor)
                    assert value.shape == param.shape
                    value = tp_transformers.full_tensor(param, value)
                error = relative(torch.as_tensor(value, dtype=torch.float), torch.as_tensor(whole, dtype=torch.float))
                result[f"{name}, {key}"] = max(error, result.get(f"{name}, {key}", 0.0))
    assert not tp_transformers.debug.check_replicas(comparison.model, optimizer)
    assert max(result.values()) < TOLERANCE, result


@on_ranks()
def test_a_rank_without_a_gradient_counts_as_zeros(folder) -> None:
    """The second rank's experts got no token."""
    comparison = Comparison(folder)
    of, rank = dict(comparison.model.named_parameters()), comparison.model.tp_group.rank
    for name in ("Adafactor", "transformers' Adafactor"):
        comparison.restart()
        optimizer, reference = comparison.optimizers(MAKERS[name])
        param = of["model.layers.0.mlp.down_proj.weight"]
        whole = dict(comparison.plain.named_parameters())["model.layers.0.mlp.down_proj.weight"]

        def drop(optimizer: Any, *_: Any, param: Any = param) -> None:
            if rank == 1:
                param.grad = None

        def zero(optimizer: Any, *_: Any, whole: Any = whole, shard: Any = param.tp_shard) -> None:
            whole.grad[:, shard.layout.local_shape(shard.shape, 0)[1] :] = 0

        optimizer.register_step_pre_hook(drop)
        reference.register_step_pre_hook(zero)
        comparison.step(optimizer, reference)
        assert comparison.error() < TOLERANCE, name


@pytest.mark.parametrize(("heads", "mode"), wide([((9, 3), "shard"), ((8, 4), "shard"), ((9, 3), "replicate")], 0))
@on_ranks(4, num_hidden_layers=1)
def test_copies_take_the_steps_of_one_process(folder, mode) -> None:
    """Two copies of the model, over which FSDP2 may cut it again."""
    mesh = mesh_of(2)
    change = lambda model: tp_transformers.data_parallel(model, mesh, mode=mode)  # noqa: E731
    comparison = Comparison(folder, change, device_mesh=mesh)
    for name in SAVED:
        assert comparison.of(MAKERS[name]) < TOLERANCE, name


# -- what is saved


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(PROMPTS, labels=PROMPTS).loss.backward()
        for param in model.parameters():  # gradients that do not depend on the number of ranks, to the bit
            local_tensor(param.grad).copy_(local_tensor(param))
        optimizer.step()


def leave(folder: str, name: str, target: str) -> dict[str, Tensor]:
    """Run on every rank: two steps, a checkpoint, and one more, also by the state of this rank's own."""
    model = load(folder)
    optimizer = MAKERS[name](model)
    steps(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=target)
    other = copy.deepcopy(model)
    again = MAKERS[name](other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 1)
    steps(other, again, 1)
    assert equal_parameters(model, other)
    return full_parameters(model)


def resume(folder: str, name: str, target: str) -> dict[str, Tensor]:
    """Run on every rank, of another number: the step after the checkpoint."""
    model = load(folder)
    optimizer = MAKERS[name](model)
    state = {"model": model.state_dict(), "optimizer": tp_transformers.training.optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=target)
    model.load_state_dict(state["model"])
    tp_transformers.training.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    steps(model, optimizer, 1)
    return full_parameters(model)


@needs("dcp")
@pytest.mark.parametrize("name", wide(SAVED, 1))
def test_states_go_on_on_another_number_of_ranks(pool, cases, tmp_path, name) -> None:
    folder = cases(9, 3).folder
    expected, *_ = pool.run(2, leave, folder, name, str(tmp_path))
    for found in pool.run(3, resume, folder, name, str(tmp_path)):
        assert max(relative_errors(found, expected).values()) < TOLERANCE


class Codes(Tensor):
    """A state of a class of its own, as torchao has for states in 8 bits."""


class QuantisesLargeStates(torch.optim.SGD):
    """Has states of that class for parameters of many elements, as torchao: on some ranks only."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for param in self.param_groups[0]["params"]:
            large = param.numel() > 1024
            self.state[param]["codes"] = torch.zeros_like(param).as_subclass(Codes if large else Tensor)
        return result


QuantisesLargeStates.tp_scope = "shard"  # type: ignore[attr-defined]


@needs("dcp")
@on_ranks()
def test_states_quantised_on_one_rank_are_rejected_on_all(folder) -> None:
    """A state that only the rank with more heads has quantised."""
    model = load(folder)
    optimizer = QuantisesLargeStates([model.model.layers[0].self_attn.k_proj.weight], lr=0.1)
    steps(model, optimizer, 1)
    with pytest.raises(tp_transformers.UnsupportedError, match="a state codes of type Codes"):
        tp_transformers.training.optimizer_state_dict(model, optimizer)


# -- other people's code around a step


@pytest.mark.parametrize("heads", HEADS)
@on_ranks()
def test_hooks_see_parameters_and_errors_leave_them(folder) -> None:
    """Hooks, classes that had an instance before the load, errors, copies of parameter lists."""
    layer, seen = nn.Linear(2, 2), []  # type: ignore[var-annotated]
    torch.optim.Muon([layer.weight])  # torch has put its hooks around the step of the class before the load
    model = load(folder)
    optimizer = torch.optim.Muon(matrices(model), lr=1e-2)
    params, q_proj = list(optimizer.param_groups[0]["params"]), model.model.layers[0].self_attn.q_proj.weight

    def before(optimizer: Any, *_: Any) -> None:
        seen.append([id(param) for param in optimizer.param_groups[0]["params"]] == list(map(id, params)))
        tp_transformers.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: seen.append(1))]
    model(PROMPTS, labels=PROMPTS).loss.backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == [True, 1]

    class Fails(torch.optim.SGD):
        tp_scope = "shard"

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].mul_(2)
            self.state[self.param_groups[0]["params"][0]]["seen"] = True
            raise ValueError("in a step")

    failing, whole = Fails([q_proj]), tp_transformers.full_tensor(q_proj)
    with pytest.raises(ValueError, match="in a step"):
        failing.step()
    assert torch.equal(tp_transformers.full_tensor(q_proj), 2 * whole)
    assert failing.param_groups[0]["params"][0] is q_proj
    assert failing.state[q_proj] == {"seen": True}


class WithoutStep(torch.optim.SGD):
    """Sharpness-aware minimization, by its methods."""

    def first_step(self) -> None: ...
    def second_step(self) -> None: ...


class Misnamed(torch.optim.SGD):
    tp_scope = "elements"


class Unknown(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


REFUSED = [
    (WithoutStep, "WithoutStep: got an optimizer of sharp"),
    (Misnamed, "Misnamed.tp_scope: got 'elements'"),
    (Unknown, "Unknown: got an optimizer whose step may need several full parameters"),
    (torch.optim.LBFGS, "inside of `with tp_transformers.training.full_parameters(model):`"),
]


@pytest.mark.parametrize(("kind", "says"), REFUSED)
@on_ranks()
def test_what_no_step_makes_right_is_refused(folder, kind, says) -> None:
    model = load(folder)
    with refused(tp_transformers.UnsupportedError, says):
        kind(model.parameters())


@pytest.mark.parametrize("heads", HEADS)
@on_ranks(num_hidden_layers=1)
def test_averages_are_those_of_one_process(folder) -> None:
    """An exponential moving average of several values of the weights."""
    models = load_both(folder)
    averaged = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in models]
    for model, average in zip(models, averaged, strict=True):
        for _ in range(3):
            average.update_parameters(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
    assert max(parameter_differences(*averaged).values()) < TOLERANCE
