"""Linears that do not fit together."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from tests.support.models import llama_config
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.strategies import Signature, State, TensorParallelLayer, get_tensor_shard

MLP = "model.layers.*.mlp."


def meta_model(**changes: object) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(8, 4, **changes))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            {"gate_proj": "colwise", "up_proj": "colwise"},
            f"{MLP}gate_proj: it leaves its features sharded, but {MLP}down_proj, which takes as many, expects "
            f"all of them; make {MLP}down_proj rowwise, or {MLP}gate_proj colwise_rep",
        ),
        (
            {"gate_proj": "colwise", "down_proj": "rowwise"},
            f"{MLP}down_proj: it expects its features sharded, but {MLP}up_proj, which makes as many, leaves "
            f"them replicated; make {MLP}up_proj colwise, or {MLP}down_proj rowwise_rep",
        ),
        (
            {"gate_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"},
            f"{MLP}gate_proj and {MLP}down_proj: the same features are split differently",
        ),
        (
            {"down_proj": "colwise"},
            f"{MLP}down_proj: it leaves its features sharded, and nothing after it in model.layers.*.mlp takes as many",
        ),
    ],
)
def test_linears_that_do_not_fit_together_are_named(rules, says) -> None:
    plan = Plan.from_dict({MLP + name: strategy for name, strategy in rules.items()})
    with pytest.raises(PlanError) as caught:
        resolve(plan, meta_model(), 2)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "rules",
    [
        {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"},
        {"gate_proj": "colwise_rep", "up_proj": "colwise_rep", "down_proj": "rowwise_rep"},
        {"down_proj": "rowwise_rep"},
        {"gate_proj": "replicate"},
    ],
)
@pytest.mark.parametrize("width", [100, 64], ids=["wide", "square"])  # in a square MLP, anything could feed anything
def test_linears_that_fit_together_are_left_alone(rules, width) -> None:
    plan = Plan.from_dict({MLP + name: strategy for name, strategy in rules.items()})
    resolve(plan, meta_model(intermediate_size=width), 3)


def test_only_the_last_linear_of_a_sequential_may_leave_its_features_sharded() -> None:
    model = meta_model()
    for layer in model.model.layers:
        layer.extra = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 48)).to("meta")
    resolve(Plan.from_dict({"model.layers.*.extra.1": "colwise"}), model, 2)
    for layer in model.model.layers:
        layer.extra[0] = nn.Linear(64, 90, device="meta")
    with pytest.raises(PlanError, match=r"extra\.\*: it leaves its features sharded, and nothing after it"):
        resolve(Plan.from_dict({"model.layers.*.extra.0": "colwise"}), model, 2)


class Chunks(TensorParallelLayer):
    """Output features, split as `torch.chunk` splits them."""

    signature = Signature(State.REPLICATED, State.FEATURES)

    def partition_tensor(self, param, empty_param, param_type, param_casting_dtype, to_contiguous, rank, device_mesh):
        return get_tensor_shard(param, empty_param, device_mesh, rank, 0)


class ChunksOfInput(Chunks):
    """The same for the input features of a Conv1D, whose weight is (in, out)."""

    signature = Signature(State.FEATURES, State.REPLICATED)


class Whole(Chunks):
    """The full weight, on every rank."""

    signature = Signature(State.REPLICATED, State.REPLICATED)

    def partition_tensor(self, param, empty_param, param_type, param_casting_dtype, to_contiguous, rank, device_mesh):
        return param[...]


def test_slices_of_an_own_strategy_have_to_fit_the_next_linear() -> None:
    plan = Plan.from_dict({f"{MLP}gate_proj": Chunks(), f"{MLP}up_proj": Chunks(), f"{MLP}down_proj": "rowwise"})
    model = meta_model(intermediate_size=100)
    resolve(plan, model, 4)  # 25 each, in both ways
    with pytest.raises(PlanError, match=r"gate_proj and .*down_proj: the same features are split differently"):
        resolve(plan, model, 3)  # 34, 34, 32, where rowwise has 34, 33, 33
    resolve(Plan.from_dict({f"{MLP}gate_proj": Whole()}), model, 3)


def test_slices_of_a_transposed_linear_have_to_fit_the_one_before() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_inner=100, n_layer=1, n_head=8))
    mlp = "transformer.h.*.mlp."
    plan = Plan.from_dict({f"{mlp}c_fc": "colwise", f"{mlp}c_proj": ChunksOfInput()})
    resolve(plan, model, 4)
    with pytest.raises(PlanError, match=r"c_fc and .*c_proj: the same features are split differently"):
        resolve(plan, model, 3)
