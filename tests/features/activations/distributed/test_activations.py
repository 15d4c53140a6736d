"""Full activations, read and edited in hooks: those of the model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tp_transformers
from tests.support.architectures import ARCHITECTURES
from tests.support.comparisons import gradient_differences, relative
from tests.support.models import PROMPTS, load, load_both, logits_of
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.debug import full_activation, local_activation

TOLERANCE = 1e-5
GRADIENTS = 1e-4

Seen = dict[tuple[str, str], Tensor]
"""By name of a module and "input" or "output"."""


def watch(model: nn.Module, names: list[str], seen: Seen, *, gathers: bool) -> None:
    """Note what the modules take and return; `gathers`: the full activations, which they also go on with."""

    def before(name: str, module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = full_activation(module, args[0], "input") if gathers else args[0]
        note(name, "input", x)
        return (local_activation(module, x, "input"), *args[1:]) if gathers else None

    def after(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        x = full_activation(module, output) if gathers else output
        note(name, "output", x)
        return local_activation(module, x) if gathers else None

    def note(name: str, side: str, x: Tensor) -> None:
        seen[name, side] = x
        if x.requires_grad:
            x.retain_grad()

    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, args, name=name: before(name, module, args))
        module.register_forward_hook(lambda module, args, output, name=name: after(name, module, args, output))


@pytest.mark.parametrize(
    ("architecture", "heads", "size"),
    wide(
        [
            ("llama", (9, 3), 2),  # uneven
            ("llama", (8, 2), 4),  # two ranks share each KV head
            ("gpt_neox", (9, 9), 2),  # fused, head after head
            ("gpt2", (9, 9), 2),  # transposed, three parts
            ("falcon", (9, 3), 2),
            ("phi3", (9, 3), 3),
            ("qwen3_moe", (9, 3), 2),
        ],
        2,
    ),
)
@on_ranks()
def test_full_activations_are_those_of_one_process(checkpoint, architecture) -> None:
    """Activations and their gradients, of all linears; and gradients of parameters."""
    ours, plain = load_both(checkpoint, getattr(transformers, ARCHITECTURES[architecture].model))
    names = [name for name, module in ours.named_modules() if isinstance(module, nn.Linear | transformers.Conv1D)]
    seen: tuple[Seen, Seen] = {}, {}
    for model, of_model, gathers in zip((ours, plain), seen, (True, False), strict=True):
        watch(model, names, of_model, gathers=gathers)
        model(PROMPTS, labels=PROMPTS).loss.backward()
    of_activations = {key: (seen[0][key].grad, x.grad) for key, x in seen[1].items() if x.grad is not None}
    of_activations = {key: pair for key, pair in of_activations.items() if pair[0] is not None}
    assert seen[0].keys() == seen[1].keys()
    for key, expected in seen[1].items():
        assert relative(seen[0][key], expected) < TOLERANCE, key
    for key, grads in of_activations.items():
        assert relative(*grads) < GRADIENTS, key
    assert max(gradient_differences(ours, plain).values()) < GRADIENTS
    assert len(of_activations) > len(names) > 8


@pytest.fixture
def checkpoint(made: Any, architecture: str, heads: tuple[int, int]) -> str:
    """A model of an architecture."""
    return made(architecture, heads).folder


@on_ranks()
def test_an_edit_of_full_activations_is_that_of_one_process(folder) -> None:
    """Features that a hook sets, on two ranks with other shards of them."""
    ours, plain = load_both(folder)

    def edit(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        x = full_activation(module, output).clone()
        x[..., 1::7] = 3
        return local_activation(module, x)

    def edit_plain(module: nn.Module, args: Any, output: Tensor) -> None:
        output[..., 1::7] = 3

    ours.model.layers[0].mlp.gate_proj.register_forward_hook(edit)
    plain.model.layers[0].mlp.gate_proj.register_forward_hook(edit_plain)
    assert relative(logits_of(ours), logits_of(plain)) < TOLERANCE


@needs("sequence")
@on_ranks()
def test_partial_sums_are_not_gathered(folder) -> None:
    """Those of a block that scatters them over the sequence."""
    model, errors = load(folder, tp_sequence_parallel=True), []
    with pytest.raises(ValueError, match="72 features, not of"):
        full_activation(model.model.layers[0].self_attn.q_proj, torch.zeros(1, 72))

    def read(module: nn.Module, args: Any, output: Tensor) -> None:
        with pytest.raises(tp_transformers.UnsupportedError, match=r"Partial\(\)") as raised:
            full_activation(module, output)
        errors.append(raised)

    model.model.layers[0].mlp.down_proj.register_forward_hook(read)
    with torch.no_grad():
        model(PROMPTS)
    assert errors
