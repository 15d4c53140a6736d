"""Each strategy alone, on one module, held against the plain module: forward, input and parameter gradients."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

import tp_transformers
from tests.support.comparisons import relative
from tests.support.groups import join
from tests.support.mixer_cases import MIXER_CASES
from tests.support.modules import HIDDEN, Routed, mixtral_experts, shard_module
from tests.support.needs import known_strategies, strategy_case
from tests.support.on_ranks import on_ranks
from tests.support.strategy_cases import CASES as OTHERS
from tests.support.strategy_cases import TOKENS, Case, randn
from tests.support.tiers import wide
from tp_transformers.slices.layout import Split
from tp_transformers.strategies import STRATEGIES, State
from tp_transformers.strategies.forward.attach import Forward
from tp_transformers.strategies.linear import ColwiseParallel, RowwiseParallel

THEIR_RULES = {
    "router": "ep_router",
    "experts": "ep_dispatch_experts",
    "experts.gate_up_proj": "grouped_gemm",
    "experts.down_proj": "grouped_gemm",
}
"""Rules of transformers' plans for expert parallelism."""


def their_experts(size: int) -> Case:
    return Case(Routed(mixtral_experts(5), HIDDEN, 5), THEIR_RULES, (randn(TOKENS, HIDDEN),))


THEIRS = {name: {"5 experts": their_experts} for name in THEIR_RULES.values()}
CASES = {**OTHERS, **MIXER_CASES, **THEIRS, "ep_router": OTHERS["replicate"]}


def own_part(x: Tensor, cut: tuple[int, Split] | None, rank: int) -> Tensor:
    """What `rank` has of `x`."""
    if cut is None:
        return x
    return x.index_select(cut[0], torch.tensor(held(cut[1], rank), dtype=torch.int))


def held(split: Split, rank: int) -> list[int]:
    return [index for start, stop in split.ranges[rank] for index in range(start, stop)]


def whole_gradient(grad: Tensor, like: Tensor, cut: tuple[int, Split] | None, group: Any) -> Tensor:
    """The sum of the gradients that the ranks have of their parts."""
    if cut is None:
        return grad
    total = torch.zeros_like(like).index_add(cut[0], torch.tensor(held(cut[1], group.rank), dtype=torch.int), grad)
    dist.all_reduce(total)
    return total


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def compare_with_module(case: Case, group: Any, by_keyword: str | None) -> dict[str, float]:
    """The largest relative difference of the output and of every gradient between the split and the plain module."""
    reference = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    expected = case.module(*reference, **case.keywords)
    torch.manual_seed(1)
    weights = torch.randn_like(first_of(expected))
    (first_of(expected) * weights).sum().backward()

    local = shard_module(case.module, case.rules, group)
    given = [own_part(x, case.takes if not i else None, group.rank).clone() for i, x in enumerate(case.inputs)]
    given = [x.requires_grad_(x.is_floating_point()) for x in given]
    before = [dict(module.__dict__) for module in local.modules()]
    called = ((), {by_keyword: given[0]}) if by_keyword else (given, {})
    output = local(*called[0], **called[1], **case.keywords)
    # The forward leaves the module as it was.
    for module, attributes in zip(local.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[name] is value for name, value in attributes.items())
    assert all(hasattr(param, "tp_shard") for param in local.parameters())

    # Where several ranks compute the same part of the output, each has a share of its gradient.
    own_weights = own_part(weights, case.leaves, group.rank)
    if case.leaves is not None:
        split = case.leaves[1]
        holders = [[other for other in range(group.size) if i in held(split, other)] for i in held(split, group.rank)]
        shares = [(other.index(group.rank) + 1) / sum(range(1, len(other) + 1)) for other in holders]
        shape = [1] * weights.ndim
        shape[case.leaves[0]] = -1
        own_weights = own_weights * torch.tensor(shares, dtype=weights.dtype).view(shape)
    (first_of(output) * own_weights).sum().backward()

    differences = {"output": relative(first_of(output), own_part(first_of(expected), case.leaves, group.rank))}
    if isinstance(expected, tuple):
        assert isinstance(output, tuple)
        differences["others"] = relative(output[1], expected[1])
    for i, (own, plain) in enumerate(zip(given, reference, strict=True)):
        if own.is_floating_point():
            grad = whole_gradient(own.grad, plain, case.takes if not i else None, group)
            differences[f"input {i}"] = relative(grad, plain.grad)
    for name, param in case.module.named_parameters():
        mine = local.get_parameter(name)
        assert torch.equal(tp_transformers.full_tensor(mine), param)
        differences[name] = relative(tp_transformers.full_tensor(mine, mine.grad), param.grad)
    case.module.zero_grad()
    # Without gradients, a forward takes other ways.
    with torch.no_grad():
        silent = first_of(local(*called[0], **called[1], **case.keywords))
    differences["without gradients"] = relative(silent, first_of(output).detach())
    return differences


def test_every_strategy_is_here_by_name() -> None:
    # Those of invariant plans are held bit by bit: test_invariant.py.
    assert known_strategies(CASES) == sorted(name for name in STRATEGIES if not name.startswith("invariant_"))


@pytest.mark.parametrize("size", wide([3, 2], 1))
@pytest.mark.parametrize("name", [strategy_case(name) for name in CASES])
@on_ranks()
def test_strategy_matches_the_plain_module(name) -> None:
    group = join()
    for label, make in CASES[name].items():
        torch.manual_seed(0)
        case = make(group.size)
        case.module.to(case.inputs[0].dtype if case.inputs[0].is_floating_point() else torch.float64)
        for by_keyword in (None, "input") if isinstance(case.module, nn.Linear | nn.Embedding) else (None,):
            differences = compare_with_module(case, group, by_keyword)
            assert max(differences.values()) < case.tolerance, (label, by_keyword, differences)


LINEARS = [name for name in CASES if isinstance(STRATEGIES.find(name), ColwiseParallel | RowwiseParallel)]
"""Strategies of linears, with a short forward."""


def long_way(module: Any, x: Tensor, mesh: Any) -> Tensor:
    """`after(linear(before(x)))`, with this rank's views of the parameters."""
    strategy = module.tp_strategy
    weight, bias = (None if each is None else each.tp_shard.view(each) for each in (module.weight, module.bias))
    with mock.patch.object(module, "tp_forwards", [Forward({})]):
        (given,) = strategy.before(module, (x,), mesh)
        output = linear(given, weight, None if "bias" in strategy.hidden else bias)
        return strategy.after(module, output, mesh)  # type: ignore[no-any-return]


def largest_difference(name: str, seed: int) -> float:
    group, draw = join(), torch.Generator().manual_seed(seed)
    of_in, of_out, rows = (2 * int(each) for each in torch.randint(group.size, 9, (3,), generator=draw))
    strategy = STRATEGIES[name]
    module = shard_module(nn.Linear(of_in, of_out, bias=bool(seed % 2)), {"": name}, group)
    bound: Any = module.tp_strategy
    width = (
        bound.split_length(of_in, group.size).widths[group.rank]
        if strategy.signature.takes is State.FEATURES
        else of_in
    )
    x, found = torch.randn(rows, width, generator=draw), []
    for forward in (module, lambda x: long_way(module, x, group.device_mesh)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        output = forward(leaf)
        (output * torch.arange(output.shape[-1])).sum().backward()
        grads = [tp_transformers.local_tensor(param.grad) for param in module.parameters()]
        with torch.no_grad():
            found.append([output.detach(), forward(x), leaf.grad, *grads])
    return max(float((short - long).abs().max()) if short.numel() else 0.0 for short, long in zip(*found, strict=True))


@on_ranks(2)
def test_a_short_forward_equals_the_long_way() -> None:
    """The same operators in the same order, so the same bits."""
    for name, seed in product(LINEARS, range(4)):
        assert largest_difference(name, seed) == 0, (name, seed)


@pytest.mark.parametrize("records", [True, False])
@on_ranks(2)
def test_a_bias_that_one_rank_adds_may_be_infinite(records) -> None:
    group = join()
    module = nn.Linear(2 * group.size, 2)
    nn.init.constant_(module.bias, -torch.inf)
    local = shard_module(deepcopy(module), {"": "local_rowwise"}, group)
    x = torch.arange(2.0 * group.size)
    with torch.set_grad_enabled(records):
        output = local(x.chunk(group.size)[group.rank]).detach()
    dist.all_reduce(output)
    assert output.tolist() == module(x).tolist()


@on_ranks(2)
def test_a_forward_that_raises_leaves_the_module_whole() -> None:
    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    local = shard_module(Picky(4, 4), {"": "rowwise"}, join())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            local(torch.ones(1, 2))
        assert local.bias is not None
        assert isinstance(local.weight, DTensor)
        assert type(local.weight).__name__ == "ShardDTensor"
    dist.barrier()


def observed_states(name: str) -> tuple[list[State], list[State]]:
    """The states that a linear's strategy declares (what it takes, inside, what it leaves), and those that are seen."""
    group = join()
    torch.manual_seed(0)
    plain = nn.Linear(8, 12, dtype=torch.float64)
    module = shard_module(plain, {"": name}, group)
    strategy: Any = module.tp_strategy
    signature = strategy.signature
    x = torch.randn(5, 8, dtype=torch.float64)
    takes = (-1, strategy.split_length(8, group.size)) if signature.takes is State.FEATURES else None
    weight, bias = (None if each is None else each.tp_shard.view(each) for each in (module.weight, module.bias))
    seen = []
    with mock.patch.object(module, "tp_forwards", [Forward({})]), torch.no_grad():
        given = own_part(x, takes, group.rank)
        (inner,) = strategy.before(module, (given,), group.device_mesh)
        raw = linear(inner, weight, None if "bias" in strategy.hidden else bias)
        full = plain(x)
        unbiased = full - plain.bias if "bias" in strategy.hidden else full
        states = [state_seen(each, expected) for each, expected in ((given, x), (inner, x), (raw, unbiased))]
        output = strategy.after(module, raw.clone(), group.device_mesh)
        seen = [*states, state_seen(output, full)]
    declared = [signature.takes, *(signature.inside or (signature.takes, signature.leaves)), signature.leaves]
    return declared, seen


def state_seen(own: Tensor, full: Tensor) -> State:
    """The state in which the ranks have `full`."""
    if own.shape != full.shape:
        return State.FEATURES
    total = own.clone()
    dist.all_reduce(total)
    return (
        State.REPLICATED if relative(own, full) < 1e-9 else State.PARTIAL if relative(total, full) < 1e-9 else State.ANY
    )


@on_ranks(2)
def test_signatures_say_what_ranks_have() -> None:
    for name in LINEARS:
        declared, seen = observed_states(name)
        found = [State.LOCAL if state is State.LOCAL else each for state, each in zip(declared, seen, strict=True)]
        assert found == declared, name
