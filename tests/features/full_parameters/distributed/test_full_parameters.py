"""Full parameters in a block, and the shards after the block, held against the model of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tp_transformers
from tests.support.comparisons import (
    different_tensors,
    full_gradients,
    full_parameters,
    gradient_differences,
    parameter_differences,
    relative,
    relative_errors,
)
from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import mesh_of
from tp_transformers import TensorParallelError, UnsupportedError, full_tensor
from tp_transformers.training import full_parameters as in_full

TOLERANCE = 1e-4  # fp32 sums in another order


def change(model: nn.Module) -> None:
    """Writes by index, through views, of whole parameters and by a parameter in place of another."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.data[0] = number
            param.view(-1)[3] = 0.5
            param[-1].mul_(2)
            param.mT.add_(1) if param.ndim > 1 else None
        params = dict(model.named_parameters())
        name = next(name for name in params if "down_proj" in name or "c_proj.weight" in name)
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, nn.Parameter(params[name] * 3))


NAMES = ("phi3", "llama", "mixtral", "gemma", "gpt2", "gpt_oss", "deepseek_v3")
ARCHITECTURES = pytest.mark.parametrize(
    ("name", "heads", "size"),
    wide([(name, heads, ranks) for ranks, heads in ((3, (9, 3)), (2, (8, 4))) for name in NAMES], 1),
)


@pytest.fixture
def checkpoint(made: Any, name: str, heads: tuple[int, int]) -> str:
    """A model of an architecture."""
    heads = heads if name not in ("gpt2", "deepseek_v3") else (heads[0], heads[0])
    return made(name, heads).folder


@ARCHITECTURES
@on_ranks()
def test_what_a_block_writes_is_sharded_again(checkpoint) -> None:
    model, alone = load_both(checkpoint)
    shapes = {name: tuple(param.shape) for name, param in alone.named_parameters()}
    objects = list(model.parameters())
    for writeback in (False, True):
        before = full_parameters(model)
        with in_full(model, writeback=writeback):
            inside = dict(model.named_parameters())
            assert {name: tuple(param.shape) for name, param in inside.items()} == shapes
            assert all(type(param) is nn.Parameter for param in inside.values())
            assert different_tensors(inside, dict(alone.named_parameters())) == []
            change(model)
        if not writeback:
            assert different_tensors(full_parameters(model), before) == []
    change(alone)
    assert different_tensors(full_parameters(model), dict(alone.named_parameters())) == []
    assert all(map(lambda a, b: a is b, objects, model.parameters()))
    assert relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE


@ARCHITECTURES
@on_ranks()
def test_gradients_and_forwards_in_a_block(checkpoint) -> None:
    """Gradients around and in a block, and a forward and backward in the block."""
    model, alone = load_both(checkpoint)
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    with in_full(model):
        entered = {name: param.grad.clone() for name, param in model.named_parameters()}
        expected = {name: param.grad for name, param in alone.named_parameters()}
        assert max(relative_errors(entered, expected).values()) < TOLERANCE
        losses = [each(PROMPTS, labels=PROMPTS).loss for each in (model, alone)]
        for loss in losses:
            loss.backward()
        assert abs(losses[0].item() - losses[1].item()) < TOLERANCE
        inside = {name: param.grad for name, param in model.named_parameters()}
        assert max(relative_errors(inside, expected).values()) < TOLERANCE
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1).item() for each in (model, alone)]
        assert abs(norms[0] / norms[1] - 1) < TOLERANCE
        with torch.no_grad():
            assert relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    assert max(gradient_differences(model, alone).values()) < TOLERANCE
    with in_full(model):
        model.zero_grad()
    assert full_gradients(model) == {}


@pytest.mark.parametrize("ranks", ["1", "012"])
@on_ranks(3)
def test_an_error_in_a_block_is_raised_on_all_ranks(folder, ranks) -> None:
    """An error in a block on some ranks, and what is left of the block."""
    model = load(folder)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    before, grads, kept = full_parameters(model), full_gradients(model), [*model.parameters()]

    def fail() -> None:
        with in_full(model):
            for param in model.parameters():
                param.data.zero_()
                param.grad.zero_()
            if str(dist.get_rank()) in ranks:
                raise ValueError("in a block")

    with pytest.raises((ValueError, TensorParallelError), match="in a block"):
        fail()
    assert different_tensors(full_parameters(model), before) == []
    assert different_tensors(full_gradients(model), grads) == []
    assert all(map(lambda a, b: a is b, kept, model.parameters()))


@pytest.mark.parametrize("name", ["gemma"])
@on_ranks(3)
def test_some_parameters_tied_ones_and_other_shapes(checkpoint) -> None:
    """Some parameters alone, tied ones, a deleted and a resized one, and rank 0's values."""
    model, alone = load_both(checkpoint)
    weight, head = model.model.embed_tokens.weight, model.lm_head.weight
    with in_full(model, parameters=[weight]):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert type(model.lm_head.weight) is nn.Parameter
        assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
        model.lm_head.weight.data[7] = dist.get_rank() + 1.0
    assert model.lm_head.weight is weight is head is model.model.embed_tokens.weight
    assert (full_tensor(weight)[7] == 1).all()
    with in_full(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    rows, head_rows = map(full_tensor, (weight, model.lm_head.weight))
    assert torch.equal(2 * rows, head_rows)
    with torch.no_grad():
        alone.model.embed_tokens.weight[7] = 1
        alone.lm_head.weight = nn.Parameter(alone.lm_head.weight.detach() * 2)
    assert relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    before = full_parameters(model)

    def shorten() -> None:
        with in_full(model):
            mlp = model.model.layers[0].mlp
            mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight[:50].detach())

    with pytest.raises(UnsupportedError, match="after full_parameters: got shape"):
        shorten()
    assert different_tensors(full_parameters(model), before) == []


@on_ranks(3)
def test_functions_of_torch_that_move_a_parameter(folder) -> None:
    """Functions that write to views of tensors like a parameter, too."""
    model, alone = load_both(folder)
    layers = [each.model.layers[0] for each in (model, alone)]
    with in_full(model):
        for layer in layers:
            prune.l1_unstructured(layer.mlp.down_proj, "weight", 0.3)
            parametrizations.orthogonal(layer.self_attn.q_proj)
            parametrizations.weight_norm(layer.mlp.gate_proj)
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    orig, expected = (layer.mlp.down_proj.weight_orig for layer in layers)
    assert relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    assert relative(full_tensor(orig, orig.grad), expected.grad) < TOLERANCE
    assert type(orig) is not nn.Parameter


@needs("data_parallel")
@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
@on_ranks(4)
def test_full_parameters_of_copies(folder, mode) -> None:
    """A model with copies, over which FSDP may shard it again."""
    mesh = mesh_of(2)
    model, alone = load(folder, device_mesh=mesh), load(folder, tp_plan=None)
    tp_transformers.data_parallel(model, mesh, mode=mode)
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    with in_full(model):
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        change(model)
        if mode == "shard":
            for module in (model, model.model.layers[0].mlp):
                with pytest.raises(UnsupportedError, match="in full_parameters: got a model that FSDP"):
                    module(PROMPTS)
        else:
            model(PROMPTS)
    expected = {name: param.grad for name, param in alone.named_parameters()}
    assert max(relative_errors(grads, expected).values()) < TOLERANCE
    change(alone)
    assert different_tensors(full_parameters(model), dict(alone.named_parameters())) == []
    assert relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE


# -- optimizers


class GlobalNorm(torch.optim.Optimizer):
    """Couples all parameters, draws noise, and keeps values of its own by parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.own: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            noise = torch.randn_like(param) * 0.01
            moment = self.own.setdefault(param, torch.zeros_like(param))
            moment.mul_(0.9).add_(param.grad / norm)
            param.add_(moment + noise, alpha=-self.param_groups[0]["lr"])
        self.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """Another optimizer, whose parameters go a part of the way."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        slow = [param.clone() for param in params]
        self.inner.step()
        for param, value in zip(params, slow, strict=True):
            param.lerp_(value, 0.5)


MAKERS: dict[str, Any] = {
    "GlobalNorm": lambda model: GlobalNorm(model.parameters()),
    "Lookahead": lambda model: Lookahead(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2),
}


def step(model: Any, optimizer: Any, alone: Any, reference: Any, closure: bool) -> None:
    """A step in a block, and the step of one process with the same losses and gradients."""
    seen: list[Any] = []

    def compute() -> Any:
        optimizer.zero_grad()
        loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        seen.append((loss.detach(), [param.grad.clone() for param in model.parameters()]))
        return loss

    def repeat() -> Any:
        loss, grads = seen.pop(0)
        for param, grad in zip(alone.parameters(), grads, strict=True):
            param.grad = grad
        return loss

    with in_full(model):
        torch.manual_seed(11)
        if not closure:
            compute()
        optimizer.step(compute if closure else None)
        optimizer.zero_grad()
    torch.manual_seed(11)
    if not closure:
        repeat()
    reference.step(repeat if closure else None)


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 3), ((8, 4), 2)], 1))
@on_ranks(num_hidden_layers=1)
def test_optimizers_of_full_parameters(folder) -> None:
    """Steps, in blocks, of optimizers that need all full parameters."""
    for name, make in MAKERS.items():
        model, alone = load_both(folder)
        with in_full(model):
            optimizer = make(model)
        reference = make(alone)
        for _ in range(3):
            step(model, optimizer, alone, reference, name == "LBFGS")
        error = max(parameter_differences(model, alone).values())
        assert error < 1e-6, name  # the same gradients, and the same arithmetic on them


@on_ranks()
def test_steps_on_the_other_side_of_a_block(folder) -> None:
    torch.optim.SGD([nn.Linear(2, 2).weight], lr=0.1)  # torch hooks the step of the class before the load
    model = load(folder)
    outside = torch.optim.SGD(model.parameters(), lr=0.1)
    with in_full(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
        text = r"^a step of SGD inside of full_parameters: got parameters of an optimizer that was made"
        with pytest.raises(UnsupportedError, match=text):
            outside.step()
    with pytest.raises(UnsupportedError, match=r"^a step of SGD outside of full_parameters"):
        inside.step()
    outside.step()
