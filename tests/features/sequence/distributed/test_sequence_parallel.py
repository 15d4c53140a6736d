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
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, Variant, make_case, observe
from tests.support.comparisons import gradient_errors, gradients, relative, worst
from tests.support.memory import Memory
from tests.support.models import MASK, PROMPTS, llama_config, load
from tests.support.pool import Pool
from tests.support.tiers import wide
from tp_transformers import local_tensor

pytestmark = pytest.mark.distributed

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


def compare_sequences(folder: str, reference_file: str) -> dict[str, Any]:
    """Run on every rank: the worst difference of everything from one process."""
    model = load(folder, tp_sequence_parallel=True)
    reference = torch.load(reference_file)
    seen = observe(model)
    errors = {"logits": relative(seen["logits"], reference["logits"])}
    grads = {"generate": gradient_errors(model, seen["grads"], reference["grads"])}
    one_process = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for length, way in TRAINED:
        expected = train(one_process, length, way)
        if way != "kept":
            model.gradient_checkpointing_enable({"use_reentrant": way == "re-entrant"})
            model.enable_input_require_grads()
        mine = train(model, length, way)
        model.gradient_checkpointing_disable()
        errors[f"loss {length} {way}"] = relative(mine["loss"], expected["loss"])
        states = zip(mine["states"], expected["states"], strict=True)
        errors[f"states {length} {way}"] = max(relative(*pair) for pair in states)
        grads[f"{length} {way}"] = gradient_errors(model, mine["grads"], expected["grads"])
    return {
        "values": worst(errors),
        "grads": max(((way, *worst(each)) for way, each in grads.items()), key=lambda item: item[2]),
        "tokens": torch.equal(seen["tokens"], reference["tokens"]),
    }


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
def test_architecture_matches_one_process(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, name: str, variant: Variant, size: int
) -> None:
    case = make_case(tmp_path_factory.mktemp("case"), name, *variant)
    for result in pool.run(size, compare_sequences, case.folder, case.reference):
        print(result)
        assert result["values"][1] < LOGITS_TOLERANCE, result["values"]
        assert result["grads"][2] < GRADIENT_TOLERANCE, result["grads"]
        assert result["tokens"]


def count_memory(folder: str) -> dict[str, tuple[int, int]]:
    """What `peak_of` says of the layers and of the whole model, without the options and with both."""
    options, tokens, found = {"tp_sequence_parallel": True, "tp_loss_parallel": True}, torch.arange(256).view(1, -1), {}
    for way, given in (("plain", {}), ("cut", options)):
        model = load(folder, **given).train()
        found[f"{way} layers"] = peak_of(lambda base=model.model: base(tokens)[0].square().mean(), model)
        found[f"{way} model"] = peak_of(lambda model=model: model(tokens, labels=tokens).loss, model)
    return found


def test_memory_of_activations(pool: Pool, tmp_path: Path) -> None:
    """A Llama with the proportions of SmolLM2-135M, of whose logits each layer has its share."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 409, "max_position_embeddings": 256}
    transformers.LlamaForCausalLM(llama_config(9, 3, **sizes)).save_pretrained(tmp_path)
    for found in pool.run(2, count_memory, str(tmp_path)):
        print(found)
        assert max(mine / whole for mine, whole in zip(found["cut layers"], found["plain layers"], strict=True)) < 0.75
        assert found["cut model"][1] < 0.6 * found["plain model"][1]


def fail_in_a_block(folder: str) -> tuple[bool, float]:
    """Run on every rank: an error inside a block leaves nothing behind; the next steps are as right as ever."""
    model = load(folder, tp_sequence_parallel=True).train()
    one_process = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
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
    errors = [gradient_errors(model, each["grads"], expected["grads"]) for each in (mine, copied)]
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None, max(max(each.values()) for each in errors)


def test_a_forward_that_fails_leaves_nothing_behind(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make(8, 2).save_pretrained(tmp_path)
    for is_clean, error in pool.run(2, fail_in_a_block, str(tmp_path)):
        assert is_clean
        assert error < GRADIENT_TOLERANCE


# -- dropout

DROPPED = 0.3


class Replayed(torch.nn.Module):
    """Drops what masks say, one a call."""

    def __init__(self, masks: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.masks) / (1 - DROPPED) if self.training else x


def drop_parts(folder: str) -> list[dict[str, Any]]:
    """Run on every rank: what is dropped between blocks, and what one process makes of the same."""
    results = []
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
        results.append(
            {
                "loss": relative(loss.detach(), expected.detach()),
                "grads": max(gradient_errors(model, gradients(model), gradients(one_process)).values()),
                "evaluated": relative(*evaluated),
                "kept": torch.cat(whole).float().mean().item(),
                "alike": (first == second).float().mean().item(),
                "short": all(torch.equal(*each) for each in zip(*(short for _, short, _ in everyone), strict=True)),
                "one state": torch.equal(*(state for *_, state in everyone)),
            }
        )
    return results


def test_dropouts_between_blocks_are_those_of_one_process_with_the_same_masks(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["phi"].make(9, 3).save_pretrained(tmp_path)
    for result in (result for results in pool.run(2, drop_parts, str(tmp_path)) for result in results):
        print(result)
        assert max(result["loss"], result["evaluated"]) < LOGITS_TOLERANCE
        assert result["grads"] < GRADIENT_TOLERANCE
        assert abs(result["kept"] - (1 - DROPPED)) < 0.05  # of 4,032 numbers
        assert abs(result["alike"] - (DROPPED**2 + (1 - DROPPED) ** 2)) < 0.1  # of 1,728 that are independent
        assert result["short"], "a sequence that is shorter than the ranks is whole, and dropped alike"
        assert result["one state"]


def drop_within(folder: str) -> list[torch.Tensor]:
    """Run on every rank: losses with dropouts in blocks, without sequence parallelism and with it."""
    losses = []
    for is_cut in (False, True):
        model = load(folder, tp_sequence_parallel=is_cut, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2).train()
        torch.manual_seed(5)
        loss = model(PROMPTS, labels=PROMPTS).loss
        loss.backward()
        losses.append(torch.stack([loss.detach(), tp_transformers.clip_grad_norm_(model, 1.0)]))
    assert model.tp_plan["transformer.h.*.mlp"] == "sequence_gather"
    return losses


def test_dropouts_in_blocks_are_those_without_sequence_parallelism(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["gpt2"].make(9, 9).save_pretrained(tmp_path)
    for plain, cut in pool.run(3, drop_within, str(tmp_path)):
        torch.testing.assert_close(cut, plain)
