"""A strategy of a user's own: what its `partition_tensor` cuts, and the helpers that it may use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers import LlamaForCausalLM

from tests.support.models import llama_config
from tests.support.modules import FakeMesh
from tests.support.undo import undo_partition
from tp_transformers import PlanError
from tp_transformers import strategies as ours
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.seams import features
from tp_transformers.slices.layout import Layout, Split
from tp_transformers.slices.lazy import LazyTensor, Resident
from tp_transformers.strategies import (
    Signature,
    State,
    TensorParallelLayer,
    get_packed_weights,
    get_tensor_shard,
    take,
)

SIZES = [1, 2, 3, 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_get_tensor_shard_is_a_torch_chunk(dim, size) -> None:
    whole = torch.randn(7, 6)
    chunks = whole.chunk(size, dim)
    for rank in range(size):
        # Where there are fewer chunks than ranks, the last ranks hold nothing.
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        assert torch.equal(get_tensor_shard(whole, whole, FakeMesh(size), rank, dim), expected)
        lazy = get_tensor_shard(Resident(whole), whole, FakeMesh(size), rank, dim)
        assert isinstance(lazy, LazyTensor)
        assert torch.equal(lazy.materialize(), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (1, 3), (-1, 3)])
def test_get_packed_weights_is_a_torch_tensor_split_of_every_chunk(dim, parts, size) -> None:
    whole = torch.randn(14, 15)
    for rank in range(size):
        expected = torch.cat([chunk.tensor_split(size, dim)[rank] for chunk in whole.chunk(parts, dim)], dim)
        assert torch.equal(get_packed_weights(whole, whole, FakeMesh(size), rank, dim, parts=parts), expected)
        lazy = get_packed_weights(Resident(whole), whole, FakeMesh(size), rank, dim, parts=parts)
        assert isinstance(lazy, LazyTensor)
        assert torch.equal(lazy.materialize(), expected)


def test_get_packed_weights_refuses_parts_that_are_not_equal() -> None:
    with pytest.raises(ValueError, match="15 features are not 2 equal parts"):
        get_packed_weights(torch.ones(14, 15), torch.ones(14, 15), FakeMesh(2), 0, -1)


def own(partition: Any) -> TensorParallelLayer:
    """A user's strategy; `partition(param, empty_param, rank, mesh)` cuts."""

    class Own(TensorParallelLayer):
        def partition_tensor(self, param, empty_param, param_type, dtype, to_contiguous, rank, device_mesh):
            return partition(param, empty_param, rank, device_mesh)

    return Own().bind(nn.Linear(6, 12), 4)


OF_OTHERS = Layout(0, Split(12, tuple(((3 * i, 3 * i + 1), (3 * i + 2, 3 * i + 3)) for i in range(4))))
OF_FIRST = Layout(0, Split(12, (((0, 3), (4, 5), (7, 8), (10, 11)),)))
QUARTERS = [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]]
COLUMNS = [[(0, 2)], [(2, 4)], [(4, 6)], [(0, 0)]]
CUTS: dict[str, tuple[Any, int, Any]] = {
    "even": (lambda param, empty, rank, mesh: get_tensor_shard(param, empty, mesh, rank, 0), 0, QUARTERS),
    "even along the last dim": (
        lambda param, empty, rank, mesh: get_tensor_shard(param, empty, mesh, rank, -1),
        1,
        COLUMNS,
    ),
    "packed": (
        lambda param, empty, rank, mesh: get_packed_weights(param, empty, mesh, rank, 0),
        0,
        [[(0, 2), (6, 8)], [(2, 4), (8, 10)], [(4, 5), (10, 11)], [(5, 6), (11, 12)]],
    ),
    "slices": (lambda param, empty, rank, mesh: param[rank * 3 : rank * 3 + 3], 0, QUARTERS),
    "a parameter": (lambda param, empty, rank, mesh: nn.Parameter(param.chunk(4)[rank].contiguous()), 0, QUARTERS),
    "joined": (
        lambda param, empty, rank, mesh: torch.cat([part.chunk(4)[rank] for part in param.split([4, 8])]),
        0,
        [[(0, 1), (4, 6)], [(1, 2), (6, 8)], [(2, 3), (8, 10)], [(3, 4), (10, 12)]],
    ),
    "shared": (
        lambda param, empty, rank, mesh: param[rank // 2 * 6 :][:6],
        0,
        [[(0, 6)], [(0, 6)], [(6, 12)], [(6, 12)]],
    ),
    "an empty shard": (lambda param, empty, rank, mesh: param[:, min(rank * 2, 6) : rank * 2 + 2], 1, COLUMNS),
    "lists of ranges": (
        lambda param, empty, rank, mesh: take(param, OF_OTHERS if rank else OF_FIRST, rank),
        0,
        [[(0, 3), (4, 5), (7, 8), (10, 11)], [(3, 4), (5, 6)], [(6, 7), (8, 9)], [(9, 10), (11, 12)]],
    ),
}


@pytest.mark.parametrize(("partition", "dim", "ranges"), CUTS.values(), ids=CUTS)
def test_a_strategy_of_your_own_is_asked_what_it_cuts(partition, dim, ranges) -> None:
    layer, whole = own(partition), torch.randn(12, 6)
    layout = layer.layout("weight", whole.shape, 4)
    assert layout.dim == dim
    assert [list(held) for held in layout.split.ranges] == ranges
    shards = [layer.partition_tensor(whole, whole, "weight", None, True, rank, FakeMesh(4)) for rank in range(4)]
    assert [tuple(shard.shape) for shard in shards] == [layout.local_shape(whole.shape, rank) for rank in range(4)]
    assert torch.equal(undo_partition(layer, shards, "weight", whole.shape), whole)


def test_functions_of_a_mixin_count_as_the_strategys_own() -> None:
    class Mixin:
        @staticmethod
        def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
            return inputs[0] + 1

        def after(self, module, outputs, mesh):
            return outputs + 2

    class Own(Mixin, TensorParallelLayer):
        pass

    class Further(Own):
        def before(self, module, inputs, mesh):
            return (inputs[0] + 10,)

    class Last(Further):
        pass

    module, mesh = nn.Linear(2, 2), FakeMesh(1)
    for kind, added in ((Own, 1), (Further, 10), (Last, 10)):
        strategy: Any = kind()
        assert strategy.before(module, (5,), mesh) == (5 + added,)
        assert strategy.after(module, 5, mesh) == 7
        assert strategy.acts


def test_a_strategy_of_your_own_may_cut_nothing() -> None:
    assert own(lambda param, empty, rank, mesh: param).layout("weight", (12, 6), 4) is None
    assert own(lambda param, empty, rank, mesh: param[0:12, ...]).layout("weight", (12, 6), 4) is None


COMPUTED = "not values computed from it"
OTHERS: dict[str, tuple[Any, str]] = {
    "gaps": (lambda param, empty, rank, mesh: param[rank * 3 : rank * 3 + 2], "leaves out indices of dim 0"),
    "overlaps": (lambda param, empty, rank, mesh: param[rank * 2 : rank * 2 + 6], "ranges that overlap"),
    "whole on some ranks": (lambda param, empty, rank, mesh: param if rank else param[:6], "ranges that overlap"),
    "two dims": (
        lambda param, empty, rank, mesh: param[rank * 3 : rank * 3 + 3, :2],
        r"splits dims \[0, 1\]; .* along one",
    ),
    "another dim on another rank": (
        lambda param, empty, rank, mesh: get_tensor_shard(param, empty, mesh, rank, rank % 2),
        r"splits dims \[0, 1\]; .* along one dim on all ranks",
    ),
    "computed": (lambda param, empty, rank, mesh: param[rank * 3 : rank * 3 + 3] * 2, COMPUTED),
    "joined with gaps": (
        lambda param, empty, rank, mesh: torch.cat([param[:2], param[4:]]),
        "leaves out indices of dim 0",
    ),
    "joined with another": (lambda param, empty, rank, mesh: torch.cat([param[:2], empty[4:]]), COMPUTED),
    "every second": (lambda param, empty, rank, mesh: param[::2], COMPUTED),
    "nothing": (lambda param, empty, rank, mesh: None, COMPUTED),
    "communicates": (
        lambda param, empty, rank, mesh: torch.distributed.all_reduce(param, group=mesh.get_group()),
        "fails without data: (RuntimeError: .*process groups|AttributeError: .*get_group)",
    ),
    "too many indices": (
        lambda param, empty, rank, mesh: param[:, :, :1],
        "fails without data: IndexError: too many indices",
    ),
}


@pytest.mark.parametrize(("partition", "says"), OTHERS.values(), ids=OTHERS)
def test_a_strategy_of_your_own_that_makes_no_cut_is_refused(partition, says) -> None:
    with pytest.raises(ValueError, match=says):
        own(partition).layout("weight", (12, 6), 4)


class Rows(TensorParallelLayer):
    """Cuts the output features; says nothing of its layouts."""

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        return 0


class WithoutSuper(Rows):
    def __init__(self) -> None:
        self.input_layouts = (Replicate(),)
        self.output_layouts = (Shard(-1),)


class AfterSuper(Rows):
    def __init__(self) -> None:
        super().__init__(output_layouts=Replicate())
        self.input_layouts = Replicate()
        self.output_layouts = Shard(-1)


class BeforeSuper(Rows):
    def __init__(self) -> None:
        self.input_layouts = [Replicate()]
        self.output_layouts = [Shard(-1)]
        super().__init__(use_dtensor=True)


class OnTheClass(Rows):
    input_layouts = (Replicate(),)
    output_layouts = (Shard(-1),)


class AsAProperty(Rows):
    input_layouts = Replicate()

    @property
    def output_layouts(self) -> Any:
        return Shard(-1)


class Declared(Rows):
    signature = Signature(State.REPLICATED, State.FEATURES)


class DeclaredOfInstances(Rows):
    def __init__(self) -> None:
        self.signature = Signature(State.REPLICATED)
        self.output_layouts = Shard(-1)


class OfABuiltIn(ours.ColwiseParallel):
    def __init__(self) -> None:
        self.output_layouts = (Shard(-1),)


def on_an_object() -> Any:
    strategy = Rows()
    strategy.input_layouts, strategy.output_layouts = Replicate(), Shard(-1)
    return strategy


def by_arguments() -> Any:
    return Rows(input_layouts=Replicate(), output_layouts=Shard(-1))


WAYS = (WithoutSuper, AfterSuper, BeforeSuper, OnTheClass, AsAProperty, Declared, DeclaredOfInstances, OfABuiltIn)


@pytest.mark.parametrize("make", [*WAYS, on_an_object, by_arguments], ids=lambda make: make.__name__)
def test_the_signature_follows_the_layouts_wherever_they_are_set(make) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(8, 4))
    mlp, strategy = "model.layers.*.mlp", make()
    plan = {f"{mlp}.gate_proj": strategy, f"{mlp}.up_proj": strategy, f"{mlp}.down_proj": "rowwise"}
    signature = resolve(Plan.from_dict(plan), model, 2).module_strategies["model.layers.0.mlp.up_proj"].signature
    assert (signature.takes, signature.leaves) == (State.REPLICATED, State.FEATURES)
    if "refusals" in features():
        with pytest.raises(PlanError, match="expects all"):
            resolve(Plan.from_dict({name: rule for name, rule in plan.items() if "down" not in name}), model, 2)


@pytest.mark.parametrize(
    "name", ["ReplicateParallel", "ReplicateSumGradParallel", "GatherParallel", "TensorParallelLayer"]
)
@pytest.mark.parametrize(
    "given", [{"input_layouts": Shard(1)}, {"output_layouts": Replicate()}, {"use_local_output": False}]
)
def test_a_strategy_that_has_one_way_takes_no_layouts(name, given) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(given))} of {name}: got .*, expected no such argument"):
        getattr(ours, name)(**given)
    assert getattr(ours, name)(use_dtensor=False, use_local_output=True).use_dtensor is False
