"""Gradients of gradients, against one process: a gradient penalty, and a product with the Hessian."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from tests.support.comparisons import full_gradients, relative, relative_errors
from tests.support.groups import join
from tests.support.models import PROMPTS, load
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.expert_parallel.exchange import exchange_rows
from tp_transformers.ranks.collectives import exchange_regions, gather_from_region, scatter_to_region
from tp_transformers.strategies import batch_sharded, layout_of, vocab_parallel_cross_entropy

TOLERANCE = 1e-6  # sums in another order, in fp64
SETTINGS: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": {"tp_sequence_parallel": True},
    "loss": {"tp_loss_parallel": True},
    "both": {"tp_sequence_parallel": True, "tp_loss_parallel": True},
}


def penalty(model: Any, embeddings: torch.Tensor, ids: torch.Tensor = PROMPTS) -> dict[str, torch.Tensor]:
    """The loss with the squared norm of its gradient by the input, and the gradients of that."""
    model.zero_grad()
    x = embeddings.clone().requires_grad_()
    loss = model(inputs_embeds=x, labels=ids[:, : x.shape[1]]).loss
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + 100 * grad.square().sum()  # as large as the loss
    total.backward()
    return {"total": total.detach(), "x": x.grad.clone(), **full_gradients(model)}


def hessian_product(model: Any) -> dict[str, torch.Tensor]:
    """The Hessian of the loss times a vector, by backward over a recorded backward."""
    model.zero_grad()
    params = dict(model.named_parameters())
    loss = model(PROMPTS, labels=PROMPTS).loss
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    for param, grad in zip(params.values(), grads, strict=True):
        assert type(grad) is type(param) or layout_of(param) is None
    with torch.no_grad():
        vectors = [param * 2 + 0.1 for param in params.values()]
    torch.autograd.backward(grads, vectors)
    return full_gradients(model)


SHAPES = [(3, (9, 3)), (2, (9, 3)), (2, (8, 4)), (3, (8, 2))]  # the last with KV heads that some ranks share
CASES = [(*shape, modes) for modes in (("plain", "both"), ("sequence", "loss")) for shape in SHAPES]


@pytest.mark.parametrize(("size", "heads", "modes"), wide(CASES, 1))
@on_ranks()
def test_gradients_of_gradients(folder, modes) -> None:
    whole = LlamaForCausalLM.from_pretrained(folder, **SETTINGS)
    embeddings = whole.model.embed_tokens(PROMPTS).detach()
    expected, product = penalty(whole, embeddings), hessian_product(whole)
    short = penalty(whole, embeddings[:, :5])
    for mode in modes:
        model = load(folder, **SETTINGS, **MODES[mode])
        assert max(relative_errors(penalty(model, embeddings), expected).values()) < TOLERANCE, mode
        assert max(relative_errors(penalty(model, embeddings[:, :5]), short).values()) < TOLERANCE, mode
        assert max(relative_errors(hessian_product(model), product).values()) < TOLERANCE, mode
    assert max(relative_errors(penalty(copy.deepcopy(model), embeddings), expected).values()) < TOLERANCE, "a copy"


@on_ranks(2)
def test_gradients_of_gradients_of_ranks_with_samples_of_their_own(folder) -> None:
    """Every rank has a penalty of its own; parameters of modules that gather samples have the gradient of the mean."""
    whole = LlamaForCausalLM.from_pretrained(folder, **SETTINGS)
    embeddings = whole.model.embed_tokens(PROMPTS).detach()
    expected: dict[str, torch.Tensor] = {}
    model = load(folder, tp_batch_sharded=True, **SETTINGS)
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [penalty(whole, embeddings[at : at + 1], PROMPTS[at : at + 1]) for at in range(size)]
    mine = penalty(model, embeddings[rank : rank + 1], PROMPTS[rank : rank + 1])
    inside = {param for module in batch_sharded(model) for param in module.parameters()}
    for name, param in model.named_parameters():
        if name in parts[0]:
            mean = torch.stack([part[name] for part in parts]).mean(0)
            expected[name] = mean if param in inside else parts[rank][name]
    assert len(inside) > 5
    expected |= {key: parts[rank][key] for key in ("total", "x")}
    errors = relative_errors(mine, expected)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("size", wide([3, 2], 1))
@on_ranks()
def test_second_order_of_functions() -> None:
    """What only moves numbers: the gradient of a sum of cubes is 3x², that of its squared norm 36x³. And the loss."""
    group = join()
    process_group, size, rank = group.process_group, group.size, group.rank
    assert process_group is not None
    widths, found = tuple(range(1, size + 1)), {}
    total = sum(widths)
    after, before = (rank + 1) % size, (rank - 1) % size  # each rank sends all of its rows to the next
    sent, received = (
        [widths[who] * (at == place) for at in range(size)] for who, place in ((rank, after), (before, before))
    )
    moves = {
        "exchange": lambda x: exchange_regions(x, widths, widths, process_group, dim=0, into=1),
        "rows": lambda x: exchange_rows((x,), sent, received, process_group)[0],
        "gather": lambda x: gather_from_region(x, widths, process_group, dim=0),
        "scatter": lambda x: scatter_to_region(x, widths, process_group, dim=1),
    }
    for name, move in moves.items():
        generator = torch.Generator().manual_seed(0 if name == "scatter" else rank)  # the same on all ranks, or parts
        rows = total if name == "scatter" else widths[rank]
        x = torch.randn(rows, total, generator=generator, dtype=torch.float64).requires_grad_()
        (grad,) = torch.autograd.grad(move(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        found[name] = relative(grad.detach(), 3 * x.detach() ** 2)
        found[f"{name}, twice"] = relative(second, 36 * x.detach() ** 3)
    logits = torch.randn(5, 7 * size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 5, -100, 2, 7 * size - 1])
    whole, own = logits.clone().requires_grad_(), logits.chunk(size, 1)[rank].clone().requires_grad_()
    losses = [
        cross_entropy(whole, target, reduction="sum"),
        vocab_parallel_cross_entropy(own, target, group, reduction="sum"),
    ]
    second = []
    for loss, x in zip(losses, (whole, own), strict=True):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        cubes = grad.pow(3).sum()  # of this rank's part
        (once,) = torch.autograd.grad(cubes, x, create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), x)
        second.append((once.detach(), twice))
    for name, expected, value in zip(("loss, twice", "loss, three times"), *second, strict=True):
        found[name] = relative(value, expected.chunk(size, 1)[rank])
    assert max(found.values()) < TOLERANCE, found
