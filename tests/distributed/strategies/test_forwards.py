"""One forward after another: of deep copies, of other lengths, by keywords, of blocks by themselves, and nested."""

from __future__ import annotations

import copy
import gc
import inspect
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tp_transformers
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE
from tests.support.comparisons import gradient_errors, gradients, relative
from tests.support.models import PROMPTS, VOCAB, load, load_both
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.sequence import region
from tp_transformers.features.sequence.region import RegionBlock

TOKENS = torch.randint(3, VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))


def training_error(ours: Any, theirs: Any, *batches: torch.Tensor) -> float:
    """The largest error of losses and gradients, of one backward from all batches."""
    losses = []
    for model in (ours.train(), theirs.train()):
        model.zero_grad()
        losses.append(sum(model(batch, labels=batch).loss for batch in batches))
        losses[-1].backward()
        model.eval()
    grads = gradient_errors(ours, gradients(ours), gradients(theirs))
    return max(relative(*(loss.detach() for loss in losses)), *grads.values())


@on_ranks(2, heads=(8, 2))
def test_a_copy_of_a_loss_parallel_model_has_whole_logits(folder) -> None:
    ours, theirs = load_both(folder, tp_loss_parallel=True)
    ours(PROMPTS, labels=PROMPTS)
    copied = copy.deepcopy(ours)
    expected = theirs(PROMPTS).logits.detach()
    with torch.no_grad():
        assert max(relative(model(PROMPTS).logits, expected) for model in (copied, ours)) < LOGITS_TOLERANCE
        again = copy.deepcopy(copied)
        part = again(PROMPTS, labels=PROMPTS)
        tokens = [model.generate(PROMPTS, max_new_tokens=4, do_sample=False) for model in (theirs, ours, copied, again)]
    for model in (again, copied, ours):
        assert training_error(model, theirs, TOKENS) < GRADIENT_TOLERANCE
    assert part.logits.shape[-1] == (100, 99)[dist.get_rank()]
    assert all(torch.equal(tokens[0], each) for each in tokens[1:])


@on_ranks(2, heads=(8, 2))
def test_a_copy_of_a_sequence_parallel_model_takes_other_lengths(folder) -> None:
    ours, theirs = load_both(folder, tp_sequence_parallel=True, tp_loss_parallel=True)
    assert training_error(ours, theirs, TOKENS[:, :9]) < GRADIENT_TOLERANCE
    copied = copy.deepcopy(ours)
    for model in (copied, ours, copy.deepcopy(copied)):
        for length in (10, 9, 1):  # of one token, the second rank has none
            tokens = TOKENS[:, :length]
            assert relative(model(tokens).logits.detach(), theirs(tokens).logits.detach()) < GRADIENT_TOLERANCE
        assert training_error(model, theirs, TOKENS, TOKENS[:1, :7]) < GRADIENT_TOLERANCE


@on_ranks(2, heads=(8, 2))
def test_a_copy_of_a_batch_sharded_model_takes_other_batches(folder) -> None:
    """Ranks with batches of their own, of one size and then of others."""
    ours, theirs = load_both(folder, tp_batch_sharded=True)
    rank = dist.get_rank()
    same, other = torch.stack([TOKENS, TOKENS.roll(1, 1)])[rank], TOKENS[: 1 + rank, :7]
    ours(same, labels=same).loss.backward()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for model in (copied, ours):
            for batch in (other, same, other):
                assert relative(model(batch).logits, theirs(batch).logits) < LOGITS_TOLERANCE
            # By itself, a block takes batches of any size, too.
            states = torch.ones(1 + rank, 3, ours.config.hidden_size)
            assert relative(*(each.model.layers[0].mlp(states) for each in (model, theirs))) < LOGITS_TOLERANCE


# -- arguments


def backwards(module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gives all arguments by keyword, the last one first."""
    names = list(inspect.signature(module.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **keywords}
    return (), {
        name: given[name] for name in sorted(given, key=lambda name: names.index(name) if name in names else -1)[::-1]
    }


def by_keyword(folder: str, options: dict[str, Any]) -> float:
    ours, theirs = load_both(folder, **options)
    for layer in ours.model.layers:
        for module in (layer.self_attn, layer.mlp, *layer.mlp.modules()):
            if hasattr(module, "tp_strategy"):
                module.register_forward_pre_hook(backwards, with_kwargs=True, prepend=True)
    ours.register_forward_pre_hook(backwards, with_kwargs=True, prepend=True)
    return training_error(ours, theirs, PROMPTS)


@pytest.mark.parametrize(
    ("name", "options"),
    wide(
        [
            ("llama", {"tp_sequence_parallel": True, "tp_loss_parallel": True}),
            ("mixtral", {}),
            ("llama", {"tp_batch_sharded": True}),
            ("llama", {}),
        ],
        2,
    ),
)
def test_keywords_are_bound_by_the_signature(pool, tmp_path, name, options) -> None:
    ARCHITECTURES[name].make(8, 2).save_pretrained(tmp_path)
    assert max(pool.run(2, by_keyword, str(tmp_path), options)) < GRADIENT_TOLERANCE


# -- adapters


@on_ranks(2, heads=(8, 2))
def test_no_hook_outlives_the_models(folder) -> None:
    """Hooks that every module of the process passes: for adapters, and for modules in place of sharded ones."""
    hooks = nn.modules.module._global_module_registration_hooks
    assert len(hooks) == 0
    ours, theirs = load_both(folder)
    tp_transformers.disable()
    assert len(hooks) == 2
    copied = copy.deepcopy(ours)
    del ours
    gc.collect()
    assert len(hooks) == 2
    adapted = []
    for model in (copied, theirs):
        torch.manual_seed(1)
        adapted.append(get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)))
    with torch.no_grad():
        assert relative(*(model(PROMPTS).logits for model in adapted)) < LOGITS_TOLERANCE
    del copied, adapted, model
    gc.collect()
    assert len(hooks) == 0


# -- nested, and computed again


class Checkpointed(nn.Module):
    """Computes a module again in its backward."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


@on_ranks(2, heads=(8, 2))
def test_blocks_are_nested_and_computed_again(folder) -> None:
    for use_reentrant in (False, True):
        ours, theirs = load_both(folder, tp_sequence_parallel=True)
        for layer in ours.model.layers:
            layer.mlp = Checkpointed(layer.mlp, use_reentrant)
        # Two forwards of other lengths before one backward.
        names = {name: name.replace("mlp.module.", "mlp.") for name, _ in ours.named_parameters()}
        for model in (ours, theirs):
            sum(model(batch, labels=batch).loss for batch in (TOKENS, TOKENS[:, :9], TOKENS[:, :7])).backward()
        grads = [{names.get(name, name): grad for name, grad in gradients(model).items()} for model in (ours, theirs)]
        for layer in ours.model.layers:
            layer.mlp = layer.mlp.module
        assert max(gradient_errors(ours, *grads).values()) < GRADIENT_TOLERANCE
        # A block that is called again while it computes.
        calls: list[int] = []

        def again(module: nn.Module, *_: Any, mlp: Any = ours.model.layers[0].mlp, calls: list[int] = calls) -> None:
            calls.append(len(calls))
            if len(calls) == 1:
                with torch.no_grad():
                    mlp(torch.zeros(1, 2, module.width))

        act = ours.model.layers[0].mlp.act_fn
        act.width = ours.config.hidden_size
        handle = act.register_forward_hook(again)
        assert training_error(ours, theirs, TOKENS[:, :4]) < GRADIENT_TOLERANCE
        handle.remove()
        assert len(calls) == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@on_ranks(2, heads=(8, 2))
def test_norms_are_made_again_of_what_they_were_made_of(folder) -> None:
    """Norms, which a backward computes again, have inputs, outputs or parameters of a hook or a call."""
    ours, theirs = load_both(folder, tp_sequence_parallel=True)

    def shift(module: nn.Module, args: Any) -> Any:
        return (args[0] + 1,)

    def in_place(module: nn.Module, args: Any) -> None:
        args[0].add_(1)

    for name, hook in (("post_attention_layernorm", shift), ("mlp", in_place)):
        layers = (model.model.layers[0] for model in (ours, theirs))
        handles = [layer.get_submodule(name).register_forward_pre_hook(hook) for layer in layers]
        assert training_error(ours, theirs, TOKENS) < GRADIENT_TOLERANCE, name
        for handle in handles:
            handle.remove()
    for model in (ours, theirs):
        model.zero_grad()
        norms = {name: 2 * param for name, param in model.named_parameters() if "layernorm" in name}
        functional_call(model, norms, (TOKENS,), {"labels": TOKENS}).loss.backward()
    assert max(gradient_errors(ours, gradients(ours), gradients(theirs)).values()) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("namespace", "kept"),
    wide([("_c10d_functional", ["all_reduce", "wait_tensor"]), ("aten", ["mm"]), ("aten", ["_to_copy", "clone"])], 1),
)
@on_ranks(2, heads=(8, 2))
def test_a_recomputation_may_keep_results(folder, namespace, kept) -> None:
    """Selective activation checkpointing: what is kept is not to be summed over the ranks once more."""
    ours, theirs = load_both(folder)
    operators = [getattr(getattr(torch.ops, namespace), each).default for each in kept]
    context = partial(create_selective_checkpoint_contexts, operators)
    ours.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    assert training_error(ours, theirs, TOKENS) < GRADIENT_TOLERANCE


@on_ranks(2, heads=(8, 2))
def test_tangents_of_forward_mode_are_refused(folder) -> None:
    mlp, states = load(folder).model.layers[0].mlp.requires_grad_(False), torch.ones(1, 2, 64)
    told = "^torch.autograd.forward_ad in a tensor-parallel model: got tangents"
    for records in (True, False):
        with (
            torch.set_grad_enabled(records),
            forward_ad.dual_level(),
            pytest.raises(tp_transformers.UnsupportedError, match=told),
        ):
            mlp(forward_ad.make_dual(states, states))
    mlp(states)


# -- hooks of parameters


@on_ranks(2, heads=(8, 2))
def test_parameters_may_have_hooks_and_be_frozen(folder) -> None:
    ours, theirs = load_both(folder)
    called: list[str] = []
    for model in (ours, theirs):
        mlp = model.model.layers[0].mlp
        for name in ("gate_proj", "down_proj"):
            layer = mlp.get_submodule(name)
            layer.weight.register_hook(lambda grad: grad * 2)
            layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    assert training_error(ours, theirs, PROMPTS) < GRADIENT_TOLERANCE
    for model in (ours, theirs):
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
        model.model.layers[1].mlp.forward = lambda x: x  # whose layers are not called
    trained = (name for name, param in theirs.named_parameters() if param.requires_grad)
    names = [name for name in trained if "layers.1.mlp" not in name]
    grads = []
    for model in (ours, theirs):
        model.zero_grad()
        model(PROMPTS, labels=PROMPTS).loss.backward()
        grads.append(gradients(model))
        assert list(grads[-1]) == names
    assert max(gradient_errors(ours, *grads).values()) < GRADIENT_TOLERANCE
    assert sorted(called) == ["down_proj"] * 4 + ["gate_proj"] * 4


# -- misfits


def misfit(folder: str) -> list[Any]:
    """Run on every rank: a module pads its tokens to a multiple of 2, which the parts of some ranks are already."""
    ours, theirs = load_both(folder, tp_sequence_parallel=True)

    norm = ours.model.layers[0].post_attention_layernorm
    forward = norm.forward

    def pad(*args: Any) -> torch.Tensor:
        output = forward(*args)
        return torch.cat([output, output[:, : output.shape[1] % 2]], 1)

    found: list[Any] = []
    norm.forward = pad
    for length in (8, 9, 10, 7):
        try:
            ours(TOKENS[:, :length])
            found.append(length)
        except tp_transformers.PlanError as error:
            found.append(str(error))
    norm.forward = forward
    found.append(training_error(ours, theirs, TOKENS[:, :9]))
    return found


def test_a_misfit_on_one_rank_is_one_error_on_all(pool, cases) -> None:
    results = pool.run(2, misfit, cases(8, 2).folder)
    for *said, worst in results:
        assert said == results[0][:-1]
        assert said[0] == 8
        assert "model.layers.0.mlp: got an input of lengths (6, 4) on the ranks, expected lengths (5, 4)" in said[1]
        assert "got an input of lengths (6, 6) on the ranks, expected lengths (5, 5)" in said[2]
        assert "got an input of lengths (4, 4) on the ranks, expected lengths (4, 3)" in said[3]
        assert worst < GRADIENT_TOLERANCE


@on_ranks(2, heads=(8, 2))
def test_ranks_tell_lengths_once_where_parts_differ(folder) -> None:
    ours = load(folder, tp_sequence_parallel=True)
    blocks = sum(isinstance(getattr(module, "tp_strategy", None), RegionBlock) for module in ours.modules())
    with mock.patch.object(region, "all_lengths", wraps=region.all_lengths) as asked:
        for length, times in ((8, 0), (10, 0), (9, blocks), (9, 0), (10, 0), (7, blocks), (9, 0), (7, 0)):
            asked.reset_mock()
            ours(TOKENS[:, :length]).logits.sum().backward()
            assert asked.call_count == times, length
        asked.reset_mock()
        copy.deepcopy(ours)(TOKENS[:, :9])
        assert asked.call_count == 0
