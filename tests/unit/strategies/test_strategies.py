"""Every strategy's slicing, held against an index list; undone, the shards are the original."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.pytorch_utils import Conv1D

from tests.support.modules import FakeMesh
from tests.support.needs import known_strategies, needs, strategy_case
from tests.support.undo import undo_partition
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.slices.layout import Ranks, chunked, heads
from tp_transformers.slices.lazy import LazyTensor, Resident
from tp_transformers.strategies import STRATEGIES, LocalConfig, take
from tp_transformers.strategies.base import EXPERT_UNIT
from tp_transformers.strategies.registry import CORE

SIZES = [1, 2, 3, 5]


class Experts(nn.Module):
    """Five experts of (out, in) matrices, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(5, 2 * 20, 12))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(5, 2 * 20))
        self.down_proj = nn.Parameter(torch.randn(5, 12, 20))
        self.down_proj_bias = nn.Parameter(torch.randn(5, 12))


MODULES = {
    "linear": lambda: nn.Linear(10, 14),
    "embedding": lambda: nn.Embedding(23, 6, padding_idx=3),
    "conv1d": lambda: Conv1D(14, 10),  # weight (in, out)
    "experts": Experts,
    "norm": lambda: nn.LayerNorm(10),
    "rms norm": lambda: nn.RMSNorm(10, eps=1e-6),
    "convolution": lambda: nn.Conv1d(6, 10, 3),
    "depthwise convolution": lambda: nn.Conv1d(10, 10, 3, groups=10),
    "dropout": nn.Dropout,
}

# kind of module -> parameter -> the sharded dim; None if it is replicated.
ShardedDims = dict[str, dict[str, int | None]]

OUTPUT_FEATURES: ShardedDims = {
    "linear": {"weight": 0, "bias": 0},
    "embedding": {"weight": 1},
    "conv1d": {"weight": 1, "bias": 0},
    "experts": {"gate_up_proj": 1, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": 1},
}
INPUT_FEATURES: ShardedDims = {
    "linear": {"weight": 1, "bias": None},
    "embedding": {"weight": 0},
    "conv1d": {"weight": 0, "bias": None},
    # A bias of experts goes with weights of (experts, in, out), whose output features `rowwise` shards.
    "experts": {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 2, "down_proj_bias": 1},
}
NOTHING: ShardedDims = {kind: {name: None for name, _ in make().named_parameters()} for kind, make in MODULES.items()}
COMPLETE_EXPERTS: ShardedDims = {**NOTHING, "experts": dict.fromkeys(NOTHING["experts"], 0)}


def without(dims: ShardedDims, *kinds: str) -> ShardedDims:
    return {kind: params for kind, params in dims.items() if kind not in kinds}


SHARDED_DIMS: dict[str, ShardedDims] = {
    "colwise": OUTPUT_FEATURES,
    "colwise_rep": OUTPUT_FEATURES,
    "colwise_gather_output": OUTPUT_FEATURES,
    "embedding_colwise": OUTPUT_FEATURES,
    "packed_colwise": without(OUTPUT_FEATURES, "embedding"),
    "local_colwise": {**OUTPUT_FEATURES, "norm": {"weight": 0, "bias": 0}, "rms norm": {"weight": 0}},
    "local_packed_colwise": {**OUTPUT_FEATURES, "norm": {"weight": 0, "bias": 0}, "rms norm": {"weight": 0}},
    "rowwise": INPUT_FEATURES,
    "rowwise_rep": INPUT_FEATURES,
    "rowwise_split_input": INPUT_FEATURES,
    "embedding_rowwise": INPUT_FEATURES,
    "packed_rowwise": without(INPUT_FEATURES, "embedding"),
    "local_rowwise": {**without(INPUT_FEATURES, "embedding"), "norm": {"weight": None, "bias": None}},
    "local_packed_rowwise": {**without(INPUT_FEATURES, "embedding"), "norm": {"weight": None, "bias": None}},
    "sharded_norm": {"norm": {"weight": 0, "bias": 0}, "rms norm": {"weight": 0}},
    "sharded_moments": {},
    "sharded_products": NOTHING,
    "gated_norm": {"rms norm": {"weight": 0}},
    "channelwise": {kind: {"weight": 0, "bias": 0} for kind in ("linear", "depthwise convolution")},
    "rowwise_inner": INPUT_FEATURES,
    "local": COMPLETE_EXPERTS,
    "moe_tp_experts": NOTHING,
    "moe_all_to_all": {"experts": COMPLETE_EXPERTS["experts"]},
    "grouped_gemm": COMPLETE_EXPERTS,
    "ep_dispatch_experts": NOTHING,
    "ep_router": NOTHING,
    "moe_identity_expert": NOTHING,
    "local_params": NOTHING,
    "gather": NOTHING,
    "all_reduce": NOTHING,
    "alibi": NOTHING,
    "mla_kv_a_proj": NOTHING,
    "colwise_loss": OUTPUT_FEATURES,
    "loss_parallel": NOTHING,
    "sequence_scatter": NOTHING,
    "sequence_parallel": NOTHING,
    "sequence_parallel_rep": NOTHING,
    "sequence_gather": NOTHING,
    "sequence_whole": NOTHING,
    "sequence_states": NOTHING,
    "replicate": NOTHING,
    "replicate_inner": NOTHING,
    "replicate_once": NOTHING,
    "replicated_with_grad_allreduce": NOTHING,
}
"""The sharded dims of every strategy, for the modules that it fits."""

PACKED = ("packed_colwise", "packed_rowwise", "local_packed_colwise", "local_packed_rowwise")
"""Strategies that shard two equal parts, each by itself."""


def indices(length: int, size: int, rank: int, *, parts: int = 1, unit: int = 1) -> list[int]:
    """The indices that `rank` holds: in each part, blocks of `unit` are dealt out, the first ranks getting one more."""
    held = []
    for part in torch.arange(length).chunk(parts):
        blocks = part.split(unit)
        mine = torch.tensor_split(torch.arange(len(blocks)), size)[rank]
        held += [index for block in mine for index in blocks[block].tolist()]
    return held


def test_every_strategy_is_here_by_name() -> None:
    # Those of invariant plans split in other blocks: tests/features/invariant/distributed/test_invariant.py.
    assert known_strategies(SHARDED_DIMS) == sorted(name for name in STRATEGIES if not name.startswith("invariant_"))


@pytest.mark.parametrize("name", [strategy_case(name) for name in SHARDED_DIMS])
def test_every_rank_holds_its_indices_and_undo_is_the_original(name) -> None:
    for kind, size in product(SHARDED_DIMS[name], SIZES):
        check_slices(name, kind, size)


def check_slices(name: str, kind: str, size: int) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    layer = STRATEGIES[name].bind(module, size, config=SimpleNamespace(qk_rope_head_dim=2))
    assert SHARDED_DIMS[name][kind].keys() == dict(module.named_parameters()).keys()
    for param_type, dim in SHARDED_DIMS[name][kind].items():
        full = module.get_parameter(param_type).detach()
        shards = []
        for rank in range(size):
            lazy = take(Resident(full), layer.layout(param_type, full.shape, size), rank)
            real = layer.partition_tensor(full, full, param_type, torch.float64, True, rank, FakeMesh(size))
            expected = full
            if dim is not None:
                unit = 8 if kind == "experts" and dim > 0 else 1
                held = indices(full.shape[dim], size, rank, parts=2 if name in PACKED else 1, unit=unit)
                expected = full.index_select(dim, torch.tensor(held, dtype=torch.int))
            assert isinstance(lazy, LazyTensor)
            assert torch.equal(lazy.materialize(), expected)
            assert torch.equal(real, expected.double())
            assert real.dtype == torch.float64
            assert real.is_contiguous()
            shards.append(lazy.materialize())
        assert torch.equal(undo_partition(layer, shards, param_type, full.shape), full)
        if dim is not None:
            assert sum(shard.numel() for shard in shards) == full.numel()


@pytest.mark.parametrize("name", [strategy_case(name) for name in SHARDED_DIMS])
def test_strategies_accept_the_modules_that_they_cut(name) -> None:
    # A rule for the parameter of experts has no module to fit.
    kinds = SHARDED_DIMS[name].keys() - (
        {"experts"} if name not in ("moe_tp_experts", "ep_dispatch_experts") else set()
    )
    for module in (MODULES[kind]() for kind in kinds):
        STRATEGIES[name].bind(module, 2, config=SimpleNamespace(qk_rope_head_dim=2)).check(module)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [(name, kind, "no linear or embedding") for name in ("colwise", "packed_rowwise") for kind in ("norm", "experts")]
    + [(name, "embedding", "no packed parts") for name in ("packed_colwise", "packed_rowwise")]
    + [(name, "embedding", "use embedding_rowwise") for name in ("local_rowwise", "local_packed_rowwise")]
    + [strategy_case("sharded_norm", kind, "no norm whose mean") for kind in ("linear", "embedding", "dropout")]
    + [strategy_case("mla_kv_a_proj", "linear", "no qk_rope_head_dim")]
    + [strategy_case("moe_all_to_all", kind, "sends tokens by the ids of") for kind in ("linear", "experts")],
)
def test_strategies_refuse_modules_that_they_do_not_fit(name, kind, says) -> None:
    module = MODULES[kind]()
    with pytest.raises(ValueError, match=says):
        STRATEGIES[name].bind(module, 2, config=SimpleNamespace()).check(module)


@pytest.mark.parametrize(
    ("parts", "says"),
    [(None, "not 2 equal parts"), (3, "not 3 equal parts"), ((4, 4), "add up to 8"), (("query", "key"), "not lengths")],
)
def test_packed_parts_that_do_not_fit(parts, says) -> None:
    layer = STRATEGIES["packed_colwise"].bind(nn.Linear(4, 7), 2, parts=parts)
    with pytest.raises(ValueError, match=says):
        layer.layout("weight", (7, 4), 2)


@pytest.mark.parametrize(
    ("name", "kind", "rows_of_rank_1"),
    [
        ("colwise", "linear", (slice(5, 10), slice(None))),
        ("rowwise", "linear", (slice(None), slice(4, 7))),
        ("embedding_rowwise", "embedding", (slice(8, 16), slice(None))),
        ("embedding_colwise", "embedding", (slice(None), slice(2, 4))),
    ],
)
def test_what_rank_1_of_3_holds(name, kind, rows_of_rank_1) -> None:
    module = MODULES[kind]()
    full = module.weight.detach()
    got = STRATEGIES[name].bind(module, 3).partition_tensor(full, full, "weight", None, True, 1, FakeMesh(3))
    assert torch.equal(got, full[rows_of_rank_1])


def test_what_rank_1_of_2_holds_of_packed_parts() -> None:
    full = torch.arange(14.0)[:, None]
    strategy = STRATEGIES["packed_colwise"].bind(nn.Linear(1, 14), 2, parts=(4, 10))
    got = strategy.partition_tensor(full, full, "weight", None, True, 1, FakeMesh(2))
    assert got.flatten().tolist() == [2, 3, 9, 10, 11, 12, 13]


def test_heads_stand_for_as_many_indices_as_the_length_has_for_one() -> None:
    query, kv = heads(6, 2, Ranks(4))  # queries [0 1 | 2 | 3 4 | 5], KV heads [0 | 0 | 1 | 1]
    layer = STRATEGIES["colwise"].bind(nn.Linear(5, 12), 4, split=query)
    assert layer.layout("weight", (12, 5), 4).split.ranges == (((0, 4),), ((4, 6),), ((6, 10),), ((10, 12),))
    layer = STRATEGIES["colwise"].bind(nn.Linear(5, 12), 4, split=kv)
    assert layer.layout("bias", (12,), 4).split.ranges == (((0, 6),), ((0, 6),), ((6, 12),), ((6, 12),))
    with pytest.raises(ValueError, match="weight along dim 0: its 13 features are not 6 complete heads"):
        STRATEGIES["colwise"].bind(nn.Linear(5, 13), 4, split=query).layout("weight", (13, 5), 4)


@pytest.mark.parametrize("name", ["colwise", "rowwise", "packed_colwise", "packed_rowwise"])
def test_widths_of_experts_are_multiples_of_8_but_for_the_last_block(name) -> None:
    assert EXPERT_UNIT == 8
    parts = 2 if name in PACKED else 1
    for width, size in product((8, 20, 64, 100), SIZES):
        shape = (5, width * parts, width * parts)
        split = STRATEGIES[name].bind(Experts(), size).layout("gate_up_proj", shape, size).split
        starts = range(0, width * parts, width)
        for held in split.ranges:
            assert len(held) == parts
            for start, (low, high) in zip(starts, held, strict=True):
                assert (low - start) % 8 == 0 or low == start + width
                assert (high - start) % 8 == 0 or high == start + width


@pytest.mark.parametrize("name", ["colwise", "packed_colwise"])
def test_a_bias_of_experts_is_cut_as_the_output_features_are(name) -> None:
    for param, size in product(("gate_up_proj", "down_proj"), SIZES):
        experts = Experts()
        layer = STRATEGIES[name].bind(experts, size)
        weight, bias = (layer.layout(own, experts.get_parameter(own).shape, size) for own in (param, f"{param}_bias"))
        assert weight == bias
        assert bias.dim == 1


def test_a_unit_is_that_of_the_rule() -> None:
    rule = Plan.from_dict({"experts.gate_up_proj": {"strategy": "rowwise", "unit": 16}}).rules[0]
    assert rule.unit == 16
    for param_type, shape in (("gate_up_proj", (5, 12, 40)), ("gate_up_proj_bias", (5, 40))):
        layout = STRATEGIES["rowwise"].bind(Experts(), 2, unit=rule.unit).layout(param_type, shape, 2)
        assert layout.split.ranges == (((0, 32),), ((32, 40),))
    layout = STRATEGIES["packed_colwise"].bind(nn.Linear(3, 20), 3, unit=4).layout("weight", (20, 3), 3)
    assert layout.split.ranges == (((0, 4), (10, 14)), ((4, 8), (14, 18)), ((8, 10), (18, 20)))


WHOLE_EXPERT_RULES = {
    "a rule for the experts": {
        "model.layers.*.mlp": "gather",
        "model.layers.*.mlp.gate": "replicated_with_grad_allreduce",
        "model.layers.*.mlp.experts": "local",
    },
    "a rule for each parameter": {
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "model.layers.*.mlp.experts.gate_up_proj": "local",
        "model.layers.*.mlp.experts.down_proj": "local",
    },
}


def mixtral() -> Any:
    config = MixtralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_key_value_heads=2,
        num_attention_heads=2,
        num_local_experts=2,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@needs("expert_parallel")
@pytest.mark.parametrize("rules", WHOLE_EXPERT_RULES.values(), ids=WHOLE_EXPERT_RULES)
def test_fewer_experts_than_ranks_are_refused(rules) -> None:
    resolve(Plan.from_dict(rules), mixtral(), 2)
    with pytest.raises(PlanError, match="2 experts cannot be spread over 3 ranks"):
        resolve(Plan.from_dict(rules), mixtral(), 3)


@needs("expert_parallel")
def test_experts_that_are_partly_spread_and_partly_cut_are_refused() -> None:
    rules = {**WHOLE_EXPERT_RULES["a rule for each parameter"], "model.layers.*.mlp.experts.down_proj": "rowwise"}
    with pytest.raises(PlanError, match="complete experts of gate_up_proj, but not of down_proj"):
        resolve(Plan.from_dict(rules), mixtral(), 2)


@pytest.mark.parametrize("name", ["colwise", "rowwise", "local_colwise", "local_rowwise"])
@pytest.mark.parametrize("method", ["before", "after"])
def test_a_short_forward_calls_a_method_that_a_class_of_this_package_overrides(name, method) -> None:
    base: Any = type(STRATEGIES[name])
    body = {method: lambda self, module, values, mesh: values, "__module__": base.__module__}
    strategy = type("Other", (base,), body)()
    short = strategy.short_forward()
    assert strategy.is_built_in
    assert STRATEGIES[name].short_forward() is not None
    assert short is None or short[("before", "after").index(method)] == method


@pytest.mark.parametrize("name", CORE)
def test_a_class_that_inherits_from_that_of_a_strategy_splits_alike(name) -> None:
    own: Any = type("Own", (type(STRATEGIES[name]),), {})()
    assert own.split_length(12, 2) == STRATEGIES[name].split_length(12, 2)


def test_a_local_config_has_what_it_does_not_set() -> None:
    shared = SimpleNamespace(heads=8, width=4)
    local = LocalConfig(shared, heads=2)
    shared.width = 5
    assert (local.heads, local.width, hasattr(local, "other")) == (2, 5, False)


def test_torch_gets_chunks_of_its_own_sizes_but_whole_units() -> None:
    ours, torchs = (STRATEGIES["colwise"].bind(nn.Linear(6, 10), 4) for _ in range(2))
    torchs.applied_by_torch = True
    assert ours.split_length(10, 4) == Ranks(4).split(10) != chunked(10, 4)
    assert torchs.split_length(10, 4) == chunked(10, 4)
    assert torchs.split_length(10, 4, 2) == Ranks(4).split(10, unit=2)
