"""Full parameters in a block, and the shards after the block, held against the model of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tp_transformers
from tests.support.architectures import make_case
from tests.support.comparisons import (
    different_tensors,
    full_gradients,
    full_parameters,
    gradient_differences,
    parameter_differences,
    relative,
)
from tests.support.models import PROMPTS, load, load_both
from tests.support.needs import needs
from tests.support.pool import Pool
from tests.support.tiers import wide
from tests.support.training import mesh_of

pytestmark = pytest.mark.distributed

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


def written(folder: str) -> dict[str, Any]:
    """Run on every rank: values, shapes and outputs in a block that writes, and after the block."""
    model, alone = load_both(folder)
    found: dict[str, Any] = {}
    shapes = {name: tuple(param.shape) for name, param in alone.named_parameters()}
    objects = list(model.parameters())
    for writeback in (False, True):
        before = full_parameters(model)
        with tp_transformers.training.full_parameters(model, writeback=writeback):
            inside = dict(model.named_parameters())
            found["shapes"] = {name: tuple(param.shape) for name, param in inside.items()} == shapes
            found["plain"] = all(type(param) is nn.Parameter for param in inside.values())
            found["values"] = not different_tensors(inside, dict(alone.named_parameters()))
            change(model)
        if not writeback:
            found["discarded"] = not different_tensors(full_parameters(model), before)
    change(alone)
    found["written"] = not different_tensors(full_parameters(model), dict(alone.named_parameters()))
    found["objects"] = all(map(lambda a, b: a is b, objects, model.parameters()))
    found["output"] = relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    return found


NAMES = ("phi3", "llama", "mixtral", "gemma", "gpt2", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "heads", "ranks"),
    wide([(name, heads, ranks) for ranks, heads in ((3, (9, 3)), (2, (8, 4))) for name in NAMES], 1),
)
def test_what_a_block_writes_is_sharded_again(
    pool: Pool, tmp_path: Path, name: str, heads: tuple[int, int], ranks: int
) -> None:
    heads = heads if name not in ("gpt2", "deepseek_v3") else (heads[0], heads[0])
    for found in pool.run(ranks, written, make_case(tmp_path, name, *heads).folder):
        assert all(found.values()), found


def computed(folder: str) -> dict[str, Any]:
    """Run on every rank: gradients around and in a block, and a forward and backward in the block."""
    model, alone = load_both(folder)
    found: dict[str, Any] = {}
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    with tp_transformers.training.full_parameters(model):
        inside = {name: param.grad.clone() for name, param in model.named_parameters()}
        expected = {name: param.grad for name, param in alone.named_parameters()}
        found["entered"] = max(relative(inside[name], grad) for name, grad in expected.items())
        for each in (model, alone):
            loss = each(PROMPTS, labels=PROMPTS).loss
            loss.backward()
            found.setdefault("loss", []).append(loss.item())
        found["inside"] = max(relative(param.grad, expected[name]) for name, param in model.named_parameters())
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1).item() for each in (model, alone)]
        found["norm"] = abs(norms[0] / norms[1] - 1)
        with torch.no_grad():
            found["logits"] = relative(model(PROMPTS).logits, alone(PROMPTS).logits)
    found["left"] = max(gradient_differences(model, alone).values())
    found["loss"] = abs(found["loss"][0] - found["loss"][1])
    with tp_transformers.training.full_parameters(model):
        model.zero_grad()
    found["none"] = float(len(full_gradients(model)))
    return found


@pytest.mark.parametrize(
    ("name", "heads", "ranks"),
    wide([(name, heads, ranks) for ranks, heads in ((3, (9, 3)), (2, (8, 4))) for name in NAMES], 1),
)
def test_gradients_and_forwards_in_a_block(
    pool: Pool, tmp_path: Path, name: str, heads: tuple[int, int], ranks: int
) -> None:
    heads = heads if name not in ("gpt2", "deepseek_v3") else (heads[0], heads[0])
    for found in pool.run(ranks, computed, make_case(tmp_path, name, *heads).folder):
        assert max(found.values()) < TOLERANCE, found


def failed(folder: str, ranks: str) -> dict[str, Any]:
    """Run on every rank: an error in a block on some ranks, and what is left of it."""
    model = load(folder)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    before, grads = full_parameters(model), full_gradients(model)
    kept = [*model.parameters()]

    def fail() -> None:
        with tp_transformers.training.full_parameters(model):
            for param in model.parameters():
                param.data.zero_()
                param.grad.zero_()
            if str(dist.get_rank()) in ranks:
                raise ValueError("in a block")

    with pytest.raises((ValueError, tp_transformers.TensorParallelError)) as raised:
        fail()
    return {
        "text": "in a block" in str(raised.value),
        "values": not different_tensors(full_parameters(model), before),
        "gradients": not different_tensors(full_gradients(model), grads),
        "objects": all(map(lambda a, b: a is b, kept, model.parameters())),
    }


@pytest.mark.parametrize("ranks", ["1", "012"])
def test_an_error_in_a_block_is_raised_on_all_ranks(pool: Pool, cases: Any, ranks: str) -> None:
    for found in pool.run(3, failed, cases(9, 3).folder, ranks):
        assert all(found.values()), found


def some(folder: str) -> dict[str, Any]:
    """Run on every rank: some parameters alone, tied ones, a deleted and a resized one, and rank 0's values."""
    model, alone = load_both(folder)
    found: dict[str, Any] = {}
    weight, head = model.model.embed_tokens.weight, model.lm_head.weight
    with tp_transformers.training.full_parameters(model, parameters=[weight]):
        found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        found["full"] = type(model.lm_head.weight) is nn.Parameter
        found["sharded"] = type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
        model.lm_head.weight.data[7] = dist.get_rank() + 1.0
    found["still tied"] = model.lm_head.weight is weight is head is model.model.embed_tokens.weight
    found["rank 0"] = bool((tp_transformers.full_tensor(weight)[7] == 1).all())
    with tp_transformers.training.full_parameters(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    rows, head_rows = map(tp_transformers.full_tensor, (weight, model.lm_head.weight))
    found["untied"] = torch.equal(2 * rows, head_rows)
    with torch.no_grad():
        alone.model.embed_tokens.weight[7] = 1
        alone.lm_head.weight = nn.Parameter(alone.lm_head.weight.detach() * 2)
    found["output"] = relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    before = full_parameters(model)

    def shorten() -> None:
        with tp_transformers.training.full_parameters(model):
            mlp = model.model.layers[0].mlp
            mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight[:50].detach())

    with pytest.raises(tp_transformers.UnsupportedError, match="after full_parameters: got shape"):
        shorten()
    found["kept"] = not different_tensors(full_parameters(model), before)
    return found


def test_some_parameters_tied_ones_and_other_shapes(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(3, some, make_case(tmp_path, "gemma", 9, 3).folder):
        assert all(found.values()), found


def by_torch(folder: str) -> dict[str, float]:
    """Run on every rank: torch's functions that write to views of tensors like a parameter, or move it."""
    model, alone = load_both(folder)
    layers = [each.model.layers[0] for each in (model, alone)]
    with tp_transformers.training.full_parameters(model):
        for layer in layers:
            prune.l1_unstructured(layer.mlp.down_proj, "weight", 0.3)
            parametrizations.orthogonal(layer.self_attn.q_proj)
            parametrizations.weight_norm(layer.mlp.gate_proj)
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    orig = layers[0].mlp.down_proj.weight_orig
    return {
        "logits": relative(model(PROMPTS).logits, alone(PROMPTS).logits),
        "gradient": relative(tp_transformers.full_tensor(orig, orig.grad), layers[1].mlp.down_proj.weight_orig.grad),
        "not sharded": float(type(orig) is nn.Parameter),
    }


def test_functions_of_torch_that_move_a_parameter(pool: Pool, cases: Any) -> None:
    for found in pool.run(3, by_torch, cases(9, 3).folder):
        assert max(found.values()) < TOLERANCE, found


def under_copies(folder: str, mode: str) -> dict[str, Any]:
    """Run on every rank: a model with copies, over which FSDP may shard it again."""
    mesh = mesh_of(2)
    model, alone = load(folder, device_mesh=mesh), load(folder, tp_plan=None)
    tp_transformers.data_parallel(model, mesh, mode=mode)
    found: dict[str, Any] = {}
    for each in (model, alone):
        each(PROMPTS, labels=PROMPTS).loss.backward()
    with tp_transformers.training.full_parameters(model):
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        change(model)
        if mode == "shard":
            for module in (model, model.model.layers[0].mlp):
                with pytest.raises(tp_transformers.UnsupportedError, match="in full_parameters: got a model that FSDP"):
                    module(PROMPTS)
        else:
            model(PROMPTS)
    expected = {name: param.grad.clone() for name, param in alone.named_parameters()}
    found["gradients"] = max(relative(grads[name], grad) for name, grad in expected.items()) < TOLERANCE
    change(alone)
    found["written"] = not different_tensors(full_parameters(model), dict(alone.named_parameters()))
    found["output"] = relative(model(PROMPTS).logits, alone(PROMPTS).logits) < TOLERANCE
    return found


@needs("data_parallel")
@pytest.mark.parametrize("mode", wide(["shard", "replicate"], 1))
def test_full_parameters_of_copies(pool: Pool, cases: Any, mode: str) -> None:
    for found in pool.run(4, under_copies, cases(9, 3).folder, mode):
        assert all(found.values()), found


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

    with tp_transformers.training.full_parameters(model):
        torch.manual_seed(11)
        if not closure:
            compute()
        optimizer.step(compute if closure else None)
        optimizer.zero_grad()
    torch.manual_seed(11)
    if not closure:
        repeat()
    reference.step(repeat if closure else None)


def trained(folder: str) -> dict[str, float]:
    """Run on every rank: errors after steps, in blocks, of optimizers that need all full parameters."""
    found = {}
    for name, make in MAKERS.items():
        model, alone = load_both(folder)
        with tp_transformers.training.full_parameters(model):
            optimizer = make(model)
        reference = make(alone)
        for _ in range(3):
            step(model, optimizer, alone, reference, name == "LBFGS")
        found[name] = max(parameter_differences(model, alone).values())
    return found


@pytest.mark.parametrize(("heads", "ranks"), wide([((9, 3), 3), ((8, 4), 2)], 1))
def test_optimizers_of_full_parameters(pool: Pool, cases: Any, heads: tuple[int, int], ranks: int) -> None:
    for found in pool.run(ranks, trained, cases(*heads, num_hidden_layers=1).folder):
        assert max(found.values()) < 1e-6, found  # the same gradients, and the same arithmetic on them


def around_blocks(folder: str) -> list[str]:
    """Run on every rank: the errors of steps on the other side of a block than the optimizer."""
    torch.optim.SGD([nn.Linear(2, 2).weight], lr=0.1)  # torch hooks the step of the class before the load
    model, texts = load(folder), []
    outside = torch.optim.SGD(model.parameters(), lr=0.1)
    with tp_transformers.training.full_parameters(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(tp_transformers.UnsupportedError) as raised:
            outside.step()
        texts.append(str(raised.value))
    with pytest.raises(tp_transformers.UnsupportedError) as raised:
        inside.step()
    texts.append(str(raised.value))
    outside.step()
    return texts


def test_steps_on_the_other_side_of_a_block(pool: Pool, cases: Any) -> None:
    for texts in pool.run(2, around_blocks, cases(9, 3).folder):
        assert texts[0].startswith(
            "a step of SGD inside of full_parameters: got parameters of an optimizer that was made"
        )
        assert texts[1].startswith("a step of SGD outside of full_parameters")
