"""The loss of logits that stay cut along the vocabulary, held against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, observe
from tests.support.comparisons import compare_seen, gradient_errors, gradients, relative, worst
from tests.support.groups import counts, join
from tests.support.models import MASK, PROMPTS, VOCAB, load
from tests.support.needs import needs
from tests.support.pool import Pool, WorkerError
from tests.support.tiers import wide
from tp_transformers.strategies import ColwiseParallel, vocab_parallel_cross_entropy
from tp_transformers.strategies.shards.tensors import ShardTensor

pytestmark = pytest.mark.distributed


def cut_at_every_size(vocabulary: int) -> float:
    """Run on every rank: the worst difference from the cross entropy of the whole logits."""
    group = join()
    torch.manual_seed(0)
    logits = torch.randn(2, 5, vocabulary, dtype=torch.float64) * 5
    target = torch.randint(vocabulary, (2, 5))
    target[0, 3] = -100
    widths, error = counts(vocabulary, group.size), 0.0
    start = sum(widths[: group.rank])
    for reduction, known in (("mean", None), ("sum", widths), ("none", widths)):
        whole, part = (x.clone().requires_grad_() for x in (logits, logits.narrow(-1, start, widths[group.rank])))
        expected = cross_entropy(whole.flatten(0, 1), target.flatten(), reduction=reduction)
        expected = expected.view(target.shape) if reduction == "none" else expected
        loss = vocab_parallel_cross_entropy(part, target, group, widths=known, reduction=reduction)
        weights = torch.rand_like(expected)
        (expected * weights).sum().backward()
        (loss * weights).sum().backward()
        own = whole.grad.narrow(-1, start, widths[group.rank])
        error = max(error, relative(loss.detach(), expected.detach()))
        error = max(error, relative(part.grad, own)) if own.numel() else error
    return error


@pytest.mark.parametrize(("vocabulary", "size"), [(17, 2), (18, 3), (2, 3)])
def test_parts_make_the_cross_entropy_of_the_whole(pool: Pool, vocabulary: int, size: int) -> None:
    assert max(pool.run(size, cut_at_every_size, vocabulary)) < 1e-12


class Shapes(TorchDispatchMode):
    """Whether an operation, forward or backward, makes a tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if (
                isinstance(tensor, torch.Tensor)
                and not isinstance(tensor, DTensor | ShardTensor)
                and tensor.shape[-1:] == (VOCAB,)
            ):
                self.whole.add(str(function))
        return outputs


def losses(model: Any) -> dict[str, torch.Tensor]:
    """The loss in every way that transformers asks for it."""
    shifted = PROMPTS.roll(-1, 1).masked_fill(MASK == 0, -100)
    return {
        "mean": model(PROMPTS, labels=PROMPTS).loss,
        "ignored": model(PROMPTS, labels=PROMPTS.masked_fill(MASK == 0, -100)).loss,
        "other index": model(PROMPTS, labels=PROMPTS, ignore_index=17).loss,
        "divided": model(PROMPTS, labels=PROMPTS, num_items_in_batch=torch.tensor(5)).loss,
        "by a number": model(PROMPTS, labels=PROMPTS, num_items_in_batch=3).loss,
        "shifted": model(PROMPTS, labels=PROMPTS, shift_labels=shifted).loss,
        "positional": model(PROMPTS, None, None, None, None, PROMPTS).loss,
    }


def compare_with_losses(name: str, folder: str, reference_file: str, sequence: bool) -> dict[str, Any]:
    """Run on every rank: differences from one process, and what is as wide as the vocabulary."""
    cls = getattr(transformers, ARCHITECTURES[name].model)
    model = load(folder, cls, tp_loss_parallel=True, tp_sequence_parallel=sequence)
    reference = torch.load(reference_file)
    seen = observe(model)
    found = compare_seen(model, seen, reference, noise=True)
    with torch.no_grad():
        expected = losses(cls.from_pretrained(folder))
        errors = {way: relative(loss, expected[way]) for way, loss in losses(model).items()}
        part = model(PROMPTS, labels=PROMPTS).logits
    errors["logits"] = found["logits"]
    start = sum(counts(VOCAB, model.tp_size)[: model.tp_group.rank])
    whole = model(PROMPTS).logits
    with torch.no_grad():  # the loss stays, and is given whole logits now
        errors["of whole"] = relative(model.loss_function(whole, PROMPTS, VOCAB), model(PROMPTS, labels=PROMPTS).loss)
    errors["part"] = relative(part, whole[..., start : start + part.shape[-1]].detach())
    model.zero_grad()
    with Shapes() as shapes:
        model(PROMPTS, labels=PROMPTS).loss.backward()
    with Shapes() as control:
        model(PROMPTS)
    model.loss_function = lambda logits, labels, vocab_size, **others: logits.sum() + logits.shape[-1]
    own = model(PROMPTS, labels=PROMPTS)
    return {
        "errors": worst(errors),
        "grads": found["grads"],
        "tokens": found["tokens"],
        "width": part.shape[-1],
        "whole": shapes.whole,
        "control": bool(control.whole),
        "own loss": torch.equal(own.loss, whole.sum() + VOCAB),
    }


@needs("sequence")
@pytest.mark.parametrize(
    ("name", "size", "changes", "sequence"),
    wide(
        [
            ("llama", 3, {"tie_word_embeddings": True}, True),
            ("gemma2", 2, {}, False),  # caps its logits
            ("phi", 2, {}, False),  # has a bias
            ("cohere", 4, {}, True),  # ties, and scales its logits
        ],
        2,
    ),
)
def test_model_matches_one_process_and_holds_no_whole_logits(
    pool: Pool, tmp_path: Path, name: str, size: int, changes: dict[str, Any], sequence: bool
) -> None:
    made = ARCHITECTURES[name].make(8, 2)
    if changes:
        made = type(made)(type(made.config)(**{**made.config.to_dict(), **changes}))
    made.save_pretrained(tmp_path / "checkpoint")
    reference = tmp_path / "reference.pt"
    torch.save(observe(type(made).from_pretrained(tmp_path / "checkpoint")), reference)
    results = pool.run(size, compare_with_losses, name, str(tmp_path / "checkpoint"), str(reference), sequence)
    for rank, result in enumerate(results):
        print(result)
        assert result["errors"][1] < LOGITS_TOLERANCE, result["errors"]
        assert result["grads"][1] < GRADIENT_TOLERANCE, result["grads"]
        assert result["tokens"]
        assert result["width"] == counts(VOCAB, size)[rank]
        assert not result["whole"]
        assert result["control"]
        assert result["own loss"]


def with_the_loss_of_torch(folder: str) -> tuple[float, float]:
    """Run on every rank: logits as DTensors, whose loss `loss_parallel` computes; (of the loss, of gradients)."""
    plan = tp_transformers.plans.Plan.parse(
        {"extends": "llama", "heads": {"lm_head": ColwiseParallel(use_local_output=False)}}, source="DTensor logits"
    )
    model = load(folder, tp_plan=plan)
    one_process = AutoModelForCausalLM.from_pretrained(folder)
    target = PROMPTS[:, 1:].flatten()
    expected = cross_entropy(one_process(PROMPTS).logits[:, :-1].flatten(0, 1), target)
    expected.backward()
    with loss_parallel():
        logits = model(PROMPTS).logits
        assert isinstance(logits, DTensor)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), target)
        loss.backward()
    grads = gradient_errors(model, gradients(model), gradients(one_process))
    return relative(loss.full_tensor().detach(), expected.detach()), max(grads.values())


def test_logits_as_dtensors_work_with_the_loss_parallel_of_torch(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make(8, 2).save_pretrained(tmp_path)
    for loss, grads in pool.run(2, with_the_loss_of_torch, str(tmp_path)):
        assert loss < LOGITS_TOLERANCE
        assert grads < GRADIENT_TOLERANCE


def refused_targets(folder: str) -> None:
    model = load(folder, tp_loss_parallel=True)
    model(PROMPTS, labels=PROMPTS.masked_fill(PROMPTS == 77, VOCAB))


def test_a_target_outside_the_vocabulary_is_one_error_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make(8, 2).save_pretrained(tmp_path)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, refused_targets, str(tmp_path))
    assert caught.value.errors == dict.fromkeys(range(2), f"IndexError: Target {VOCAB} is out of bounds.")


def adapt_and_resize(folder: str) -> dict[str, float]:
    """Run on every rank, with both options: LoRA everywhere, and embeddings of another size."""
    options = {"tp_loss_parallel": True, "tp_sequence_parallel": True}
    ours = load(folder, **options)
    theirs, errors = AutoModelForCausalLM.from_pretrained(folder), {}
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj", "lm_head"], init_lora_weights=False)
    adapted = []
    for model in (ours, theirs):
        torch.manual_seed(1)
        adapted.append(get_peft_model(model, config).train())
    mine, expected = (model(PROMPTS, labels=PROMPTS).loss for model in adapted)
    errors["loss of adapters"] = relative(mine.detach(), expected.detach())
    mine.backward()
    expected.backward()
    grads = [gradients(model) for model in adapted]
    assert len(grads[0]) == 2 * (3 * 2 + 1)
    errors["gradients of adapters"] = max(gradient_errors(adapted[0], *grads).values())
    ours = load(folder, **options)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for model in (ours, theirs):
        model(PROMPTS, labels=PROMPTS)
        torch.manual_seed(1)
        model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
        losses.append(model(PROMPTS + 4, labels=PROMPTS + 4).loss.detach())
    errors["loss of a larger vocabulary"] = relative(*losses)
    return errors


@needs("sequence")
def test_adapters_and_embeddings_of_another_size(pool: Pool, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].make(9, 3).save_pretrained(tmp_path)
    for errors in pool.run(2, adapt_and_resize, str(tmp_path)):
        print(errors)
        assert max(errors.values()) < LOGITS_TOLERANCE
