"""Each strategy alone, on one module, held against the plain module: forward, input and parameter gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import tp_transformers
from tests.models import relative
from tp_transformers.collectives import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tp_transformers.layout import Layout, heads
from tp_transformers.mesh import join
from tp_transformers.strategies import STRATEGIES, ColwiseParallel, ParamShard, attach, take

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-12  # float64: only the order of the sums differs


def shard_module(module: nn.Module, layer: Any, group: Any) -> nn.Module:
    """What the loader does to one module."""
    local, shards = copy.deepcopy(module), {}
    layer = layer.bind(local, group.size)
    for name, param in list(local.named_parameters()):
        layout = layer.layout(name, param.shape, group.size)
        shard = ParamShard(param.shape, layout, group, layer.use_dtensor)
        local._parameters[name] = shard.wrap(take(param.detach(), layout, group.rank).clone(), requires_grad=True)
        shards[name] = shard
    attach(local, layer, shards, group.device_mesh)
    return local


def run_strategy(name: str, kind: str, by_keyword: bool) -> dict[str, float]:
    """Returns the largest relative differences; gathers what the strategy leaves sharded."""
    group = join()
    torch.manual_seed(0)
    if kind == "embedding":
        module: nn.Module = nn.Embedding(23, 7, padding_idx=3).double()
        x = torch.tensor([[0, 3, 22, 11], [5, 3, 17, 8]])
    else:
        module = nn.Linear(10, 14, bias=kind == "biased").double()
        x = torch.randn(3, 4, 10, dtype=torch.float64)
    reference_x = x.clone().requires_grad_(x.is_floating_point())
    expected = module(reference_x)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    local = shard_module(module, STRATEGIES[name], group)
    layer = local.tp_strategy
    own_x = x.clone().requires_grad_(x.is_floating_point())
    given = own_x
    process_group = group.process_group
    if name == "rowwise" and kind != "embedding":
        given = scatter_to_region(
            own_x, layer.layout("weight", module.weight.shape, group.size).split.widths, process_group
        )
    output = local(input=given) if by_keyword else local(given)
    if name == "colwise":
        output = gather_from_region(output, layer.output_split(local).widths, process_group)
    (output * weights).sum().backward()
    differences = {"output": relative(output, expected)}
    if x.is_floating_point():
        differences["input grad"] = relative(own_x.grad, reference_x.grad)
    for key, param in module.named_parameters():
        mine = local.get_parameter(key)
        differences[key] = relative(tp_transformers.full_tensor(mine, mine.grad), param.grad)
        assert torch.equal(tp_transformers.full_tensor(mine), param)
    # The forward leaves the module as it was.
    assert all(hasattr(param, "tp_shard") for param in local.parameters())
    assert getattr(local, "padding_idx", None) == getattr(module, "padding_idx", None)
    return differences


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate")
        for kind in ("plain", "biased")
    ]
    + [("colwise_gather_output", "biased"), ("rowwise_split_input", "biased")]
    + [("embedding_rowwise", "embedding"), ("embedding_colwise", "embedding"), ("rowwise", "embedding")],
)
def test_strategy_matches_the_plain_module(pool: Any, name: str, kind: str, size: int) -> None:
    for by_keyword in (False, True):
        for differences in pool.run(size, run_strategy, name, kind, by_keyword):
            assert max(differences.values()) < TOLERANCE, differences


def run_packed() -> float:
    """A fused gate and up projection, cut by parts, into a row-parallel down projection."""
    group = join()
    torch.manual_seed(0)
    gate_up, down = nn.Linear(6, 2 * 11).double(), nn.Linear(11, 6).double()

    def forward(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        gate, up = first(x).chunk(2, -1)
        return second(torch.relu(gate) * up)

    x = torch.randn(5, 6, dtype=torch.float64)
    expected = forward(gate_up, down, x)
    expected.square().sum().backward()
    first = shard_module(gate_up, STRATEGIES["packed_colwise"], group)
    second = shard_module(down, STRATEGIES["rowwise"], group)
    output = forward(first, second, x)
    output.square().sum().backward()
    return max(
        relative(output, expected),
        relative(tp_transformers.full_tensor(first.weight, first.weight.grad), gate_up.weight.grad),
        relative(tp_transformers.full_tensor(first.bias, first.bias.grad), gate_up.bias.grad),
        relative(tp_transformers.full_tensor(second.weight, second.weight.grad), down.weight.grad),
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_packed_colwise_into_rowwise(pool: Any, size: int) -> None:
    assert max(pool.run(size, run_packed)) < TOLERANCE


def run_shared_heads() -> list[float]:
    """A packed query-key-value weight whose KV heads are replicated: every rank ends with the whole gradient."""
    group = join()
    query, kv = heads(8, 2, group.size)
    from tp_transformers.layout import packed

    layout = Layout(0, packed([query, kv, kv]))
    weight = torch.arange(12.0, dtype=torch.float64).reshape(12, 1)
    shard = ParamShard(weight.shape, layout, group)
    shard.connect()
    local = shard.wrap(take(weight, layout, group.rank).clone(), requires_grad=True)
    # Every rank adds its rank + 1 to the gradient of all that it holds.
    (shard.view(local) * (group.rank + 1)).sum().backward()
    return tp_transformers.full_tensor(local, local.grad).flatten().tolist()


def test_gradients_of_shared_indices_are_summed_over_their_holders(pool: Any) -> None:
    # 4 ranks: KV head 0 on ranks 0 and 1 (1 + 2), KV head 1 on ranks 2 and 3 (3 + 4).
    expected = [1.0, 1, 2, 2, 3, 3, 4, 4, 3, 7, 3, 7]
    for result in pool.run(4, run_shared_heads):
        assert result == expected


def run_collectives() -> list[float]:
    group = join()
    rank, size, process_group = group.rank, group.size, group.process_group
    widths = tuple(range(1, size + 1))
    results = []

    # f: identity forward, sum backward.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = copy_to_region(x, process_group)
    (y * (rank + 1)).sum().backward()
    results += [relative(y, x.detach()), relative(x.grad, torch.full((2, 3), float(sum(widths))))]
    # g: sum forward, identity backward; the input is left as it was.
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = reduce_from_region(x, process_group)
    (y * 5).sum().backward()
    results += [relative(y, torch.full((2, 3), float(sum(widths)))), relative(x.grad, torch.full((2, 3), 5.0))]
    results.append(float((x != rank + 1).any()))
    # Gather and scatter are each other's backward, along any dim.
    for dim in (0, 1, -1):
        whole = torch.arange(2.0 * 3 * sum(widths)).reshape(2, 3, sum(widths)).movedim(-1, dim)
        start = sum(widths[:rank])
        part = whole.narrow(dim, start, widths[rank])
        x = part.clone().requires_grad_()
        y = gather_from_region(x, widths, process_group, dim=dim)
        (y * whole).sum().backward()
        results += [relative(y, whole), relative(x.grad, part)]
        x = whole.clone().requires_grad_()
        y = scatter_to_region(x, widths, process_group, dim=dim)
        (y * part).sum().backward()
        results += [relative(y, part), relative(x.grad, whole)]
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_and_their_backward(pool: Any, size: int) -> None:
    for results in pool.run(size, run_collectives):
        assert max(results) == 0


def run_dtensor_output() -> bool:
    group = join()
    torch.manual_seed(0)
    module = nn.Linear(6, 7)
    x = torch.randn(2, 6)
    results = []
    for layouts in (None, Replicate()):
        local = shard_module(module, ColwiseParallel(output_layouts=layouts, use_local_output=False), group)
        output = local(x)
        assert isinstance(output, DTensor)
        results.append(torch.allclose(output.full_tensor(), module(x), atol=1e-6))
    return all(results)


def test_outputs_can_stay_dtensors(pool: Any) -> None:
    assert all(pool.run(2, run_dtensor_output))


def run_forward_that_raises() -> str:
    group = join()

    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

    local = shard_module(Picky(4, 4), STRATEGIES["rowwise"], group)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            local(torch.ones(1, 2))
        assert local.bias is not None
        assert isinstance(local.weight, DTensor)
    dist.barrier()
    return type(local.weight).__name__


def test_a_forward_that_raises_leaves_the_module_whole(pool: Any) -> None:
    assert pool.run(2, run_forward_that_raises) == ["DTensor", "DTensor"]
