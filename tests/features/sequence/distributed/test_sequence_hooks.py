"""Hooks of users in a sequence-parallel model, held against the same hooks in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

import tp_transformers
from tests.features.sequence.distributed.test_sequence_alone import EXCHANGING
from tests.support.architectures import GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_errors, gradients, relative, relative_errors
from tests.support.logged import logged
from tests.support.models import MASK, PROMPTS, load, load_both, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide

Kept = dict[str, Tensor]
"""All that the hooks of a way have seen, in their order; gradients by what they are of, once a backward has run."""


def keep(kept: Kept, *values: Any, output: Any = None) -> None:
    """Note the tensors in `values`, each as it is now, and of the first of `output` its gradient, too."""
    first = output[0] if isinstance(output, tuple) else output
    for value in (each for each in (*values, first) if isinstance(each, Tensor)):
        kept[f"value {len(kept)}"] = value.detach().clone()
    if isinstance(first, Tensor) and first.requires_grad:
        name = f"gradient of value {len(kept) - 1}"
        first.register_hook(lambda grad: kept.__setitem__(name, grad))


Way = Callable[[Any, Kept], list[Any]]
"""(model, what its hooks see) -> handles of hooks that are on it now."""


def steering(width: int) -> Tensor:
    return torch.linspace(-2, 3, width)


def steer_in_place(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        keep(kept, args[0])
        output[:, -1] += steering(output.shape[-1])

    return [layer.register_forward_hook(hook) for layer in model.model.layers]


def steer_a_norm_in_place(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: Any) -> None:
        args[0][:, -2:] *= 0.5  # the residual, too
        keep(kept, args[0])

    return [layer.post_attention_layernorm.register_forward_pre_hook(hook) for layer in model.model.layers]


def steer_a_projection_in_place(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: Any) -> None:
        args[0].mul_(steering(args[0].shape[-1]))  # the inputs of keys and values, too
        keep(kept, args[0])

    return [layer.self_attn.q_proj.register_forward_pre_hook(hook) for layer in model.model.layers]


def replace_outputs(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        keep(kept, output=output)
        return output + output.cumsum(1).flip(-1) / 4

    first, last = model.model.layers
    return [each.register_forward_hook(hook) for each in (first.mlp, last, last.input_layernorm, model.model.norm)]


def replace_inputs(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        keep(kept, args[0])
        return args[0] - args[0].mean(1, keepdim=True)

    def attended(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keep(kept, kwargs["hidden_states"])
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].flip(1)}

    modules = (*model.model.layers, model.model.layers[1].mlp, model.model.norm)
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(attended, with_kwargs=True)
    return [handle, *(module.register_forward_pre_hook(hook) for module in modules)]


def read_alone(model: Any, kept: Kept) -> list[Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        keep(kept, *args, kwargs.get("hidden_states"), output=output)

    layer = model.model.layers[1]
    modules = (layer, layer.self_attn, layer.mlp, layer.input_layernorm, model.model.norm)
    return [module.register_forward_hook(hook, with_kwargs=True) for module in modules]


def change_gradients(model: Any, kept: Kept) -> list[Any]:
    def of_output(module: nn.Module, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        keep(kept, grads[0])
        return (grads[0].cumsum(1), *grads[1:])

    def of_input(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        keep(kept, grad_input[0], grad_output[0])
        return (grad_input[0].flip(1), *grad_input[1:])

    layers = model.model.layers
    modules = (*layers, layers[1].mlp, layers[0].input_layernorm, model.model.norm)
    before = [module.register_full_backward_pre_hook(of_output) for module in modules]
    return [*before, *(module.register_full_backward_hook(of_input) for module in modules)]


def nothing(model: Any, kept: Kept) -> list[Any]:
    return []


WAYS: tuple[Way, ...] = (
    nothing,
    steer_in_place,
    steer_a_norm_in_place,
    steer_a_projection_in_place,
    replace_outputs,
    replace_inputs,
    read_alone,
    change_gradients,
)


CASES = (
    *((way, 7, None) for way in (*WAYS, nothing)),
    *((way, 1, None) for way in (steer_in_place, change_gradients)),
    *((way, 7, reentrant) for way in (steer_in_place, replace_inputs) for reentrant in (False, True)),
)
"""(hooks, length of a sequence, use_reentrant of gradient checkpointing; None without)."""


def observe(model: Any, way: Way, length: int, use_reentrant: bool | None) -> dict[str, Any]:
    """Logits with and without gradients, gradients, tokens, and what the hooks of `way` have seen."""
    kept: Kept = {}
    handles = way(model, kept)
    inputs, mask = PROMPTS[:, -length:], MASK[:, -length:]
    model.zero_grad()
    if use_reentrant is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    output = model(inputs, attention_mask=mask, use_cache=False)
    output.logits.square().mean().backward()
    if use_reentrant is not None:
        model.eval()
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
    with torch.inference_mode():
        states = model(inputs, attention_mask=mask, output_hidden_states=True)
        tokens = model.generate(inputs, attention_mask=mask, max_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    whole = {f"state {at}": state.detach() for at, state in enumerate(states.hidden_states)}
    seen = {"trained": output.logits.detach(), "logits": states.logits, **whole}
    return {
        "values": {**kept, **seen},
        "grads": gradients(model),
        "tokens": tokens,
    }


@pytest.mark.parametrize("heads", wide([((9, 3),), ((8, 4),)], 1))
@on_ranks()
def test_hooks_see_and_change_complete_sequences(folder) -> None:
    model, whole = load_both(folder, tp_sequence_parallel=True)
    for case in CASES:
        mine, expected = observe(model, *case), observe(whole, *case)
        values = relative_errors(mine["values"], expected["values"])
        grads = gradient_errors(model, mine["grads"], expected["grads"])
        assert max(values.values()) < LOGITS_TOLERANCE, case
        assert max(grads.values()) < GRADIENT_TOLERANCE, case
        assert torch.equal(mine["tokens"], expected["tokens"]), case


# -- what is beside a plain hook


@on_ranks()
def test_hooks_of_a_copy_and_hooks_that_are_refused(folder) -> None:
    """A model beside a copy that has hooks, and the copy."""
    model, whole = load_both(folder, tp_sequence_parallel=True)
    copied = copy.deepcopy(model)
    steer_in_place(copied, {})
    assert relative(logits_of(model), logits_of(whole)) < LOGITS_TOLERANCE
    steer_in_place(whole, {})
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda module, args, output: output[:, :2])
    with pytest.raises(tp_transformers.UnsupportedError, match=r"a hook on model.layers.1: got a tensor of shape"):
        logits_of(model)
    with pytest.raises(tp_transformers.UnsupportedError, match="Use register_full_backward_hook"):
        layer.mlp.register_backward_hook(lambda *_: None)
    assert relative(logits_of(copied), logits_of(whole)) < LOGITS_TOLERANCE


@on_ranks()
def test_hooks_of_all_modules_are_told_of(folder) -> None:
    """Hooks on all modules at once are logged, once; those of torch's own see parts in silence."""
    model = load(folder, tp_sequence_parallel=True)
    with logged() as records:
        with ModuleTracker():
            logits_of(model)
        assert records == []
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
        logits_of(model)
        logits_of(model)
        handle.remove()
    (record,) = records
    name = "test_hooks_of_all_modules_are_told_of.<locals>.<lambda>"
    assert f"a hook of all modules, {name}, sees this rank's shard" in record


@pytest.mark.slow
@on_ranks()
def test_hooks_are_compiled(folder) -> None:
    """In one graph."""
    model, whole = load_both(folder, tp_sequence_parallel=True)
    steer_in_place(model, {})
    steer_in_place(whole, {})
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative(logits_of(compiled), logits_of(whole)) < LOGITS_TOLERANCE


@on_ranks(heads=(8, 2), model="mixtral")
def test_hooks_around_experts_that_exchange_tokens(folder) -> None:
    """A block whose experts exchange tokens takes hooks, its router does not."""
    model, whole = load_both(folder, tp_plan=EXCHANGING, tp_sequence_parallel=True)
    with pytest.raises(tp_transformers.UnsupportedError, match=r"layers.0.mlp.gate: got .* exchange them"):
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)
    found = [observe(each, replace_outputs, 7, None)["values"] for each in (model, whole)]
    assert max(relative_errors(*found).values()) < LOGITS_TOLERANCE
