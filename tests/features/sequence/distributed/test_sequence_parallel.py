"""Sequence parallelism, held against one process: numbers, memory, and what is communicated."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import tp_transformers
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, Variant, observe
from tests.support.comparisons import gradient_errors, gradients, relative, worst
from tests.support.memory import Memory
from tests.support.models import MASK, PROMPTS, Case, llama_config, load, load_both
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers import local_tensor

WHOLE_MATRIX = os.environ.get("MATRIX") == "1"
UNFIT = ("bloom", "falcon", "falcon with alibi", "opt", "t5", "t5 gated", "bart", "gemma3", "qwen2_vl", "qwen2_5_vl")
"""Architectures that are refused."""
TRAINED = ((7, "kept"), (1, "kept"), (2, "re-entrant"), (7, "checkpointed"))
"""(length of a sequence, what becomes of its activations): lengths below the ranks', and none of their multiples."""


def peak_of(step: Callable[[], torch.Tensor], model: torch.nn.Module) -> tuple[int, int]:
    """(bytes that a forward leaves, the most that there are until its backward has ended).

    The least of five steps: gloo's threads may hold on to what they have sent, until they are next given the time.
    """
    found = []
    for _ in range(5):
        with Memory(model) as memory:
            loss = step()
            time.sleep(0.02)
            left = memory.live
            loss.backward()
        model.zero_grad()
        found.append((left, memory.peak))
    return min(left for left, _ in found), min(peak for _, peak in found)


def train(model: Any, length: int, way: str) -> dict[str, Any]:
    """Loss and gradients of sequences of `length`, to which everything that a forward returns adds."""
    model.zero_grad()
    model.train()
    inputs = PROMPTS[:, -length:]
    records = way != "re-entrant"  # which has no gradients for what is recorded within layers
    extras = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") and records else {}
    output = model(inputs, attention_mask=MASK[:, -length:], labels=inputs, output_hidden_states=True, **extras)
    loss = output.logits.square().mean()
    if records:
        loss = sum((state.square().mean() for state in output.hidden_states), loss)
    if length > 1:  # of one token there is no loss
        loss = loss + output.loss
    loss.backward()
    model.eval()
    return {
        "loss": loss.detach(),
        "states": [state.detach() for state in (*output.hidden_states, *(output.get("router_logits") or ()))],
        "grads": gradients(model),
    }


def check_sequences(folder: str, reference_file: str, **options: Any) -> None:
    """Run on every rank: everything is that of one process, also of lengths below the ranks'."""
    model, one_process = load_both(folder, tp_sequence_parallel=True, **options)
    reference, seen = torch.load(reference_file), observe(model)
    assert relative(seen["logits"], reference["logits"]) < LOGITS_TOLERANCE
    assert torch.equal(seen["tokens"], reference["tokens"])
    assert worst(gradient_errors(model, seen["grads"], reference["grads"]))[1] < GRADIENT_TOLERANCE
    for length, way in TRAINED:
        expected = train(one_process, length, way)
        if way != "kept":
            model.gradient_checkpointing_enable({"use_reentrant": way == "re-entrant"})
            model.enable_input_require_grads()
        mine = train(model, length, way)
        model.gradient_checkpointing_disable()
        assert relative(mine["loss"], expected["loss"]) < LOGITS_TOLERANCE, (length, way)
        for state, of_one in zip(mine["states"], expected["states"], strict=True):
            assert relative(state, of_one) < LOGITS_TOLERANCE, (length, way)
        error = worst(gradient_errors(model, mine["grads"], expected["grads"]))
        assert error[1] < GRADIENT_TOLERANCE, (length, way, error)


def shapes() -> Iterator[tuple[str, Variant, int]]:
    """(architecture, variant, ranks)."""
    if not WHOLE_MATRIX:
        yield from (("llama", (8, 2), 3), ("llama", (9, 3), 4), ("mixtral", (9, 3), 2))
        yield from (("llama", variant, size) for variant, size in (((8, 2), 2), ((8, 2), 4), ((9, 3), 2), ((9, 3), 3)))
        yield from (("mixtral", (8, 2), 4), ("qwen2", (9, 3), 2), ("qwen3", (8, 2), 3))
        return
    for name in (name for name in ARCHITECTURES if name not in UNFIT):
        variants = ARCHITECTURES[name].variants
        yield from ((name, variant, size) for variant in (variants[1], variants[-1]) for size in (2, 3, 4))


@pytest.mark.parametrize(
    ("name", "variant", "size"),
    wide(
        [pytest.param(*shape, id="-".join(map(str, (shape[0], *shape[1], shape[2])))) for shape in shapes()],
        3,
    ),
)
@on_ranks()
def test_architecture_matches_one_process(case) -> None:
    check_sequences(case.folder, case.reference)


@pytest.fixture
def case(made: Any, name: str, variant: Variant) -> Case:
    """A model of an architecture, with its reference."""
    return made(name, variant)


@pytest.fixture
def like_smollm2(tmp_path: Path) -> str:
    """A Llama with the proportions of SmolLM2-135M, of whose logits each layer has its share."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 409, "max_position_embeddings": 256}
    transformers.LlamaForCausalLM(llama_config(9, 3, **sizes)).save_pretrained(tmp_path)
    return str(tmp_path)


@on_ranks()
def test_memory_of_activations(like_smollm2) -> None:
    """`peak_of` the layers and of the whole model, without the options and with both."""
    options, tokens, found = {"tp_sequence_parallel": True, "tp_loss_parallel": True}, torch.arange(256).view(1, -1), {}
    for way, given in (("plain", {}), ("cut", options)):
        model = load(like_smollm2, **given).train()
        found[f"{way} layers"] = peak_of(lambda base=model.model: base(tokens)[0].square().mean(), model)
        found[f"{way} model"] = peak_of(lambda model=model: model(tokens, labels=tokens).loss, model)
    assert max(mine / whole for mine, whole in zip(found["cut layers"], found["plain layers"], strict=True)) < 0.75
    assert found["cut model"][1] < 0.6 * found["plain model"][1]


@on_ranks(heads=(8, 2), model="llama")
def test_a_forward_that_fails_leaves_nothing_behind(folder) -> None:
    """The steps after an error inside a block are as right as ever."""
    model, one_process = (each.train() for each in load_both(folder, tp_sequence_parallel=True))
    expected = train(one_process, 7, "kept")

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(PROMPTS)
    handle.remove()
    mine = train(model, 7, "kept")
    copied = train(copy.deepcopy(model), 7, "kept")
    model.zero_grad()
    loss = model(PROMPTS, labels=PROMPTS).loss
    loss.backward(retain_graph=True)
    once = {name: param.grad.clone() for name, param in model.named_parameters()}
    loss.backward()  # gathers as often again
    twice = {name: param.grad / 2 for name, param in model.named_parameters()}
    assert all(torch.equal(local_tensor(twice[name]), local_tensor(grad)) for name, grad in once.items())
    for each in (mine, copied):
        assert max(gradient_errors(model, each["grads"], expected["grads"]).values()) < GRADIENT_TOLERANCE
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# -- dropout

DROPPED = 0.3


class Replayed(torch.nn.Module):
    """Drops what masks say, one a call."""

    def __init__(self, masks: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.masks) / (1 - DROPPED) if self.training else x


@on_ranks(model="phi")
def test_dropouts_between_blocks_are_those_of_one_process_with_the_same_masks(folder) -> None:
    for checkpoints in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = load(folder, tp_sequence_parallel=True, resid_pdrop=DROPPED).train()
        if checkpoints is not None:
            model.gradient_checkpointing_enable(checkpoints)
            model.enable_input_require_grads()
        masks: list[torch.Tensor] = []
        for layer in model.model.layers:
            torch.nn.Module.register_forward_hook(  # past our method: it sees a part
                layer.resid_dropout, lambda _, __, output, seen=masks: seen.append(output != 0)
            )
        torch.manual_seed(5)
        loss = model(PROMPTS, labels=PROMPTS).loss
        count = len(masks)
        if checkpoints is None:
            with torch.no_grad():
                model(PROMPTS[:, :1])  # which is not cut
        short = masks[count:]
        loss.backward()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (masks, short, torch.get_rng_state()))
        whole = [torch.cat(parts, 1) for parts in zip(*(seen[:4] for seen, *_ in everyone), strict=True)]
        replayed = Replayed(iter(whole))
        one_process = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
        for layer in one_process.model.layers:
            layer.resid_dropout = replayed
        expected = one_process(PROMPTS, labels=PROMPTS).loss
        expected.backward()
        first, second = (torch.cat([mask[:, :3] for mask in seen[:4]]) for seen, *_ in everyone)
        with torch.no_grad():
            evaluated = [each.eval()(PROMPTS).logits for each in (model, one_process)]
        assert relative(loss.detach(), expected.detach()) < LOGITS_TOLERANCE
        assert relative(*evaluated) < LOGITS_TOLERANCE
        errors = gradient_errors(model, gradients(model), gradients(one_process))
        assert max(errors.values()) < GRADIENT_TOLERANCE, errors
        kept, alike = (mask.float().mean().item() for mask in (torch.cat(whole), first == second))
        assert abs(kept - (1 - DROPPED)) < 0.05  # of 4,032 numbers
        assert abs(alike - (DROPPED**2 + (1 - DROPPED) ** 2)) < 0.1  # of 1,728 that are independent
        for pair in zip(*(short for _, short, _ in everyone), strict=True):
            assert torch.equal(*pair), "a sequence that is shorter than the ranks is whole, and dropped alike"
        assert torch.equal(*(state for *_, state in everyone))


@on_ranks(3, heads=(9, 9), model="gpt2")
def test_dropouts_in_blocks_are_those_without_sequence_parallelism(folder) -> None:
    losses = []
    for is_cut in (False, True):
        model = load(folder, tp_sequence_parallel=is_cut, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2).train()
        torch.manual_seed(5)
        loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        losses.append(torch.stack([loss.detach(), tp_transformers.clip_grad_norm_(model, 1.0)]))
    assert model.tp_plan["transformer.h.*.mlp"] == "sequence_gather"
    torch.testing.assert_close(*losses)
