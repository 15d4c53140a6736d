"""Modules of a sequence-parallel model that are called by themselves, held against one process.

Outside of the model's own forward, and in hooks, every module takes and returns full sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tp_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.comparisons import gradient_errors, gradients, ranks_agree, relative, worst
from tests.support.models import PROMPTS, load, load_both
from tests.support.on_ranks import on_ranks, refused
from tests.support.tiers import wide
from tp_transformers.plans import Plan

TOLERANCE = 1e-4  # fp32 sums in another order
PARAMETERS = {f"layers.*.mlp.experts.{name}_proj": "local" for name in ("gate_up", "down")}
EXCHANGING = Plan.parse(
    {"extends": "mixtral", "optional": {"layers.*.mlp.experts": "moe_all_to_all", **PARAMETERS}}, source="mine"
)
"""A plan with experts that exchange tokens."""


def call_layer(model: Any, index: int, states: Tensor) -> Tensor:
    positions = torch.arange(states.shape[1])[None]
    mask = torch.full((states.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    rotations = model.model.rotary_emb(states, positions)
    layer = model.model.layers[index]
    output = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
    return output[0] if isinstance(output, tuple) else output


def last_norm(model: Any) -> Any:
    return next(module for name, module in model.model.named_children() if "norm" in name)


def attention_norm(model: Any, states: Tensor) -> Tensor:
    return model.model.layers[0].input_layernorm(states)


def after_a_layer(model: Any, states: Tensor) -> Tensor:
    """A layer whose output is not used, then a norm."""
    call_layer(model, 0, states)
    return attention_norm(model, states)


def in_a_hook(model: Any, states: Tensor) -> Tensor:
    """What a hook computes of the full states that it is given, in the midst of a forward."""
    first, second = model.model.layers
    found = []

    def hook(module: Any, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        inner = second.input_layernorm(output)
        found.extend([second.mlp(inner), last_norm(model)(output), inner])

    handle = first.register_forward_hook(hook)
    model.model(inputs_embeds=states)
    handle.remove()
    return torch.stack(found)


def attention(model: Any, states: Tensor) -> Tensor:
    rotations = model.model.rotary_emb(states, torch.arange(states.shape[1])[None])
    output: Tensor = model.model.layers[0].self_attn(states, position_embeddings=rotations, attention_mask=None)[0]
    return output


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "norm before attention": attention_norm,
    "last norm": lambda model, states: last_norm(model)(states),
    "first layer": lambda model, states: call_layer(model, 0, states),
    "second layer": lambda model, states: call_layer(model, 1, states),
    "two layers": lambda model, states: call_layer(model, 1, call_layer(model, 0, states)),
    "attention": attention,
    "mlp": lambda model, states: model.model.layers[1].mlp(states),
    "after a layer": after_a_layer,
    "beside the model": lambda model, states: (
        model.model(PROMPTS).last_hidden_state.mean() * attention_norm(model, states)
    ),
    "in a hook": in_a_hook,
    "checkpointed norm": lambda model, states: checkpoint(
        model.model.layers[0].input_layernorm, states, use_reentrant=False
    ),
}


def train(model: Any, loss: Callable[[Any, Tensor], Tensor], length: int) -> dict[str, Any]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(2, length, model.config.hidden_size, generator=generator, requires_grad=True)
    output = loss(model, states)
    output.pow(3).mean().backward()
    return {"output": output.detach(), "of states": states.grad, "grads": gradients(model)}


def check_alone(folder: str, lengths: tuple[int, ...], names: Iterable[str], **options: Any) -> None:
    """Run on every rank: outputs and gradients, by loss and length."""
    model, one_process = load_both(folder, tp_sequence_parallel=True, **options)
    for name in names:
        for length in lengths:
            mine, expected = (train(each, LOSSES[name], length) for each in (model, one_process))
            errors = gradient_errors(model, mine["grads"], expected["grads"])
            errors |= {key: relative(mine[key], expected[key]) for key in ("output", "of states")}
            assert max(errors.values()) < TOLERANCE, (name, length, worst(errors))


@on_ranks()
def test_modules_alone(folder) -> None:
    names = ["norm before attention", "last norm", "first layer", "second layer", "in a hook", "checkpointed norm"]
    check_alone(folder, (7,), names)


CASES = (
    ("llama", (9, 3), 2, {}),
    ("llama", (9, 3), 3, {}),
    ("phi", (9, 3), 2, {}),  # LayerNorm with a bias
    ("qwen3", (8, 2), 3, {}),  # norms of queries and keys
    ("mixtral", (9, 3), 2, {}),
    ("mixtral", (8, 2), 2, {"tp_plan": EXCHANGING}),
)


@pytest.fixture
def architecture(tmp_path: Path, name: str, heads: tuple[int, int]) -> str:
    """A model of an architecture."""
    ARCHITECTURES[name].make(*heads).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "size", "options"), CASES)
@on_ranks()
def test_all_modules_alone(architecture, options) -> None:
    check_alone(architecture, (7, 1), LOSSES, **options)


RECOMPUTED: dict[str, Callable[[Any, Tensor, bool], Tensor]] = {
    "first layer": lambda model, states, _: call_layer(model, 0, states),
    "second layer": lambda model, states, _: call_layer(model, 1, states),
    "mlp": lambda model, states, reentrant: checkpoint(model.model.layers[0].mlp, states, use_reentrant=reentrant),
    "norm": lambda model, states, _: checkpoint(attention_norm, model, states, use_reentrant=True),
}


@pytest.mark.parametrize("reentrant", wide([False, True], 1))
@pytest.mark.parametrize("name", RECOMPUTED)
@on_ranks()
def test_checkpoints_of_modules_alone_are_refused(folder, name, reentrant) -> None:
    """A recomputation could not tell whether a sequence is full."""
    model = load(folder, tp_sequence_parallel=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    states = torch.randn(2, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with refused(tp_transformers.TensorParallelError, "all the base model"):
        RECOMPUTED[name](model, states, reentrant).mean().backward()


@on_ranks(model="phi")
def test_dropouts_of_a_layer_alone_are_the_same_on_all_ranks(folder) -> None:
    """All ranks have the same full sequence."""
    model = load(folder, tp_sequence_parallel=True, resid_pdrop=0.3).train()
    torch.manual_seed(5)
    states = torch.randn(2, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert ranks_agree(*(call_layer(model, index, states).detach() for index in (0, 1)))
