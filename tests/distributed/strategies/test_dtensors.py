"""Strategies whose inputs or outputs are DTensors, held against the plain module."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tp_transformers
from tests.support.comparisons import relative
from tests.support.groups import counts, join
from tests.support.modules import randn, randomized, shard_module
from tests.support.on_ranks import on_ranks
from tests.support.strategy_cases import TOLERANCE
from tests.support.tiers import wide
from tp_transformers.ranks.collectives import gather_from_region
from tp_transformers.strategies import ColwiseParallel, SequenceParallel


@on_ranks(2)
def test_outputs_can_stay_dtensors() -> None:
    group = join()
    torch.manual_seed(0)
    module = nn.Linear(6, 7)
    x = torch.randn(2, 6)
    for layouts in (None, Replicate()):
        local = shard_module(module, {"": ColwiseParallel(output_layouts=layouts, use_local_output=False)}, group)
        output = local(x)
        assert isinstance(output, DTensor)
        assert torch.allclose(output.full_tensor(), module(x), atol=1e-6)


@on_ranks(2)
def test_compilers_are_told_of_dtensors() -> None:
    """Torch before 2.12 takes a DTensor in the memory of its local tensor for a view, and cannot compile it."""
    local = shard_module(nn.Linear(6, 4), {"": ColwiseParallel(output_layouts=Replicate())}, join())
    assert len(list(local.parameters())) == 2
    with tracing(TracingContext(FakeTensorMode())):
        for param in local.parameters():
            told = MetaTensorDescriber().describe_tensor(param)
            assert told.storage.id != told.attrs["_local_tensor"].storage.id


@on_ranks(2)
def test_gradients_of_parameters_are_dtensors() -> None:
    """As they come, are added up, are asked for, and pass hooks."""
    group = join()
    torch.manual_seed(0)
    module, x = nn.Linear(6, 4).double(), randn(2, 6)
    local = shard_module(module, {"": ColwiseParallel(output_layouts=Replicate())}, group)
    weight, seen = local.weight, []
    (expected,) = torch.autograd.grad(module(x).square().sum(), [module.weight])

    def error(grad: Any, times: int = 1) -> float:
        if isinstance(grad, DTensor):
            assert grad.placements == weight.placements
            grad = grad.full_tensor()
        return relative(grad, times * expected)

    def loss() -> Any:
        return local(x).square().sum()

    loss().backward()
    assert isinstance(weight.grad, DTensor)
    kept = weight.grad
    assert error(kept) < TOLERANCE
    loss().backward()
    assert weight.grad is kept
    assert error(kept, 2) < TOLERANCE, "added up"
    (asked,) = torch.autograd.grad(loss(), [weight])
    assert max(error(asked), error(asked + asked, 2), error(torch.stack([asked]).sum(0))) < TOLERANCE
    stored = io.BytesIO()
    torch.save(asked, stored)
    stored.seek(0)
    assert max(error(copy.deepcopy(asked)), error(torch.load(stored))) < TOLERANCE
    assert error(weight.grad, 2) < TOLERANCE, "as before"
    weight.grad = distribute_tensor(torch.zeros_like(expected), group.device_mesh, [Replicate()])
    loss().backward()
    assert relative(weight.grad.full_tensor(), expected) < TOLERANCE, "of another placement"
    weight.grad = None
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(type(param.grad)))
    weight.register_hook(lambda grad: 2 * grad)
    loss().backward()
    assert error(weight.grad, 2) < TOLERANCE, "hooked"
    assert issubclass(seen[0], DTensor)
    weight.grad = None
    with torch.autograd.detect_anomaly():
        loss().backward()
    assert error(weight.grad, 2) < TOLERANCE, "looked at for nan"


def run_dtensor_inputs(name: str, is_cut: bool) -> dict[str, float]:
    """A whole input, or one that torch.chunk cut, arrives as a DTensor; its gradient is one too."""
    group = join()
    torch.manual_seed(0)
    module = nn.Linear(10, 6).double()
    x = randn(2, 10)
    reference = x.clone().requires_grad_()
    expected = module(reference)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = shard_module(module, {"": name}, group)
    given = distribute_tensor(x, group.device_mesh, [Shard(1) if is_cut else Replicate()]).requires_grad_()
    output = local(given)
    if name == "colwise":
        output = gather_from_region(output, counts(6, group.size), group.process_group)
    (output * weights).sum().backward()
    return {
        "output": relative(output, expected),
        "input": relative(given.grad.full_tensor(), reference.grad),
        "weight": relative(tp_transformers.full_tensor(local.weight, local.weight.grad), module.weight.grad),
    }


@pytest.mark.parametrize("size", wide([3, 2], 1))
@on_ranks()
def test_inputs_may_be_dtensors() -> None:
    names = ("colwise", "colwise_rep", "rowwise", "rowwise_rep", "packed_rowwise")
    for case in product(names, (False, True)):
        differences = run_dtensor_inputs(*case)
        assert max(differences.values()) < TOLERANCE, (case, differences)


def run_sequence_of_dtensors(length: int, form: str) -> dict[str, float]:
    """A norm on a sequence that arrives whole, cut or as a plain tensor, and leaves as a DTensor."""
    group = join()
    torch.manual_seed(0)
    module = randomized(nn.LayerNorm(6)).double()
    x = randn(2, length, 6)
    reference = x.clone().requires_grad_()
    expected = module(reference)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = shard_module(module, {"": SequenceParallel(use_local_output=False)}, group)
    cut = distribute_tensor(x, group.device_mesh, [Replicate() if form == "whole" else Shard(1)])
    given = (cut.to_local() if form == "plain" else cut).detach().clone().requires_grad_()
    output = local(given)
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(1),)
    assert output.shape == x.shape
    differences = {"output": relative(output.full_tensor(), expected)}
    own_weights = distribute_tensor(weights, group.device_mesh, [Shard(1)]).to_local()
    (output.to_local() * own_weights).sum().backward()
    if form != "plain":
        differences["input"] = relative(given.grad.full_tensor(), reference.grad)
    for name, param in module.named_parameters():
        mine = local.get_parameter(name)
        differences[name] = relative(tp_transformers.full_tensor(mine, mine.grad), param.grad)
    return differences


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_sequences_leave_as_dtensors_of_their_length() -> None:
    for case in product((4, 5, 6), ("whole", "cut", "plain")):  # 4 tokens on 3 ranks: the last one has none
        differences = run_sequence_of_dtensors(*case)
        assert max(differences.values()) < TOLERANCE, (case, differences)


@on_ranks(3)
def test_a_sequence_that_no_placement_describes_is_refused_on_all_ranks() -> None:
    group = join()
    local = shard_module(nn.LayerNorm(6), {"": SequenceParallel(use_local_output=False)}, group)
    with pytest.raises(ValueError, match=r"sequence sharded into \[3, 2, 2\]; use use_local_output=True"):
        local(torch.ones(1, counts(7, 3)[group.rank], 6))
