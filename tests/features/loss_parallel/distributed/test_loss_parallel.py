"""The loss of logits that stay cut along the vocabulary, held against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tp_transformers
from tests.support.adapters import adapt
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, observe
from tests.support.comparisons import compare_seen, gradient_errors, gradients, relative, relative_errors
from tests.support.groups import counts, join
from tests.support.models import MASK, PROMPTS, VOCAB, load, load_both
from tests.support.needs import needs
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.strategies import ColwiseParallel, vocab_parallel_cross_entropy
from tp_transformers.strategies.shards.tensors import ShardTensor


@pytest.mark.parametrize(("vocabulary", "size"), [(17, 2), (18, 3), (2, 3)])
@on_ranks()
def test_parts_make_the_cross_entropy_of_the_whole(vocabulary) -> None:
    group = join()
    torch.manual_seed(0)
    logits = torch.randn(2, 5, vocabulary, dtype=torch.float64) * 5
    target = torch.randint(vocabulary, (2, 5))
    target[0, 3] = -100
    widths = counts(vocabulary, group.size)
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
        assert relative(loss.detach(), expected.detach()) < 1e-12
        assert not own.numel() or relative(part.grad, own) < 1e-12


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
@on_ranks()
def test_model_matches_one_process_and_holds_no_whole_logits(checkpoint, name, sequence) -> None:
    cls = getattr(transformers, ARCHITECTURES[name].model)
    model, alone = load_both(checkpoint, cls, tp_loss_parallel=True, tp_sequence_parallel=sequence)
    seen, expected = observe(model), observe(alone)
    found = compare_seen(model, seen, expected, noise=True)
    assert found["logits"] < LOGITS_TOLERANCE
    assert found["grads"][1] < GRADIENT_TOLERANCE, found["grads"]
    assert found["tokens"]
    with torch.no_grad():
        errors = relative_errors(losses(model), losses(alone))
        part = model(PROMPTS, labels=PROMPTS).logits
    start = sum(counts(VOCAB, model.tp_size)[: model.tp_group.rank])
    whole = model(PROMPTS).logits
    with torch.no_grad():  # the loss stays, and is given whole logits now
        errors["of whole"] = relative(model.loss_function(whole, PROMPTS, VOCAB), model(PROMPTS, labels=PROMPTS).loss)
    errors["part"] = relative(part, whole[..., start : start + part.shape[-1]].detach())
    assert max(errors.values()) < LOGITS_TOLERANCE, errors
    assert part.shape[-1] == counts(VOCAB, model.tp_size)[model.tp_group.rank]
    model.zero_grad()
    with Shapes() as shapes:
        model(PROMPTS, labels=PROMPTS).loss.backward()
    with Shapes() as control:
        model(PROMPTS)
    assert not shapes.whole
    assert control.whole
    model.loss_function = lambda logits, labels, vocab_size, **others: logits.sum() + logits.shape[-1]
    assert torch.equal(model(PROMPTS, labels=PROMPTS).loss, whole.sum() + VOCAB)


@pytest.fixture
def checkpoint(tmp_path: Path, name: str, changes: dict[str, Any]) -> str:
    """A model of an architecture, with changes of its config."""
    made = ARCHITECTURES[name].make(8, 2)
    if changes:
        made = type(made)(type(made.config)(**{**made.config.to_dict(), **changes}))
    made.save_pretrained(tmp_path)
    return str(tmp_path)


@on_ranks(heads=(8, 2), model="llama")
def test_logits_as_dtensors_work_with_the_loss_parallel_of_torch(folder) -> None:
    plan = tp_transformers.plans.Plan.parse(
        {"extends": "llama", "heads": {"lm_head": ColwiseParallel(use_local_output=False)}}, source="DTensor logits"
    )
    model, one_process = load_both(folder, tp_plan=plan)
    target = PROMPTS[:, 1:].flatten()
    expected = cross_entropy(one_process(PROMPTS).logits[:, :-1].flatten(0, 1), target)
    expected.backward()
    with loss_parallel():
        logits = model(PROMPTS).logits
        assert isinstance(logits, DTensor)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), target)
        loss.backward()
    grads = gradient_errors(model, gradients(model), gradients(one_process))
    assert relative(loss.full_tensor().detach(), expected.detach()) < LOGITS_TOLERANCE
    assert max(grads.values()) < GRADIENT_TOLERANCE


@on_ranks(heads=(8, 2), model="llama")
def test_a_target_outside_the_vocabulary_is_one_error_on_all_ranks(folder) -> None:
    model = load(folder, tp_loss_parallel=True)
    with pytest.raises(IndexError, match=rf"^Target {VOCAB} is out of bounds\.$"):
        model(PROMPTS, labels=PROMPTS.masked_fill(PROMPTS == 77, VOCAB))


@needs("sequence")
@on_ranks(model="llama")
def test_adapters_and_embeddings_of_another_size(folder) -> None:
    """With both options: LoRA everywhere, and embeddings of another size."""
    options = {"tp_loss_parallel": True, "tp_sequence_parallel": True}
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj", "lm_head"], init_lora_weights=False)
    adapted = [model.train() for model in adapt(load_both(folder, **options), config, seed=1)]
    mine, expected = (model(PROMPTS, labels=PROMPTS).loss for model in adapted)
    assert relative(mine.detach(), expected.detach()) < LOGITS_TOLERANCE
    mine.backward()
    expected.backward()
    grads = [gradients(model) for model in adapted]
    assert len(grads[0]) == 2 * (3 * 2 + 1)
    assert max(gradient_errors(adapted[0], *grads).values()) < LOGITS_TOLERANCE
    losses = []
    for model in load_both(folder, **options):
        model(PROMPTS, labels=PROMPTS)
        torch.manual_seed(1)
        model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
        losses.append(model(PROMPTS + 4, labels=PROMPTS + 4).loss.detach())
    assert relative(*losses) < LOGITS_TOLERANCE
