"""Plans that would add up too little, too much, or the wrong things."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.support.architectures import ARCHITECTURES
from tests.support.models import llama_config
from tests.support.needs import needs
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve
from tp_transformers.strategies import ReplicateParallel, TensorParallelLayer
from tp_transformers.strategies.base import EXPERT_UNIT

LAYER = "model.layers.*."
MLP = LAYER + "mlp."
ATTENTION = LAYER + "self_attn."
HEADS = {ATTENTION + name: "colwise" for name in ("q_proj", "k_proj", "v_proj")} | {ATTENTION + "o_proj": "rowwise"}
GATED = {MLP + "gate_proj": "colwise", MLP + "up_proj": "colwise", MLP + "down_proj": "rowwise"}
LOCAL = {MLP + "gate_proj": "local_colwise", MLP + "up_proj": "local_colwise", MLP + "down_proj": "local_rowwise"}


def llama() -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(8, 4))


def mixtral() -> Any:
    return ARCHITECTURES["mixtral"].make(8, 4)


def faults(rules: dict[str, Any], model: PreTrainedModel) -> str:
    resolve(Plan.from_dict(rules), model, 1)  # one rank holds everything: nothing to add up
    with pytest.raises(PlanError) as caught:
        resolve(Plan.from_dict(rules), model, 3)
    return str(caught.value)


EXPERTS = {MLP + "experts.gate_up_proj": "packed_colwise", MLP + "experts.down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            EXPERTS,
            f"{MLP}experts: on every rank its output is a partial sum that nothing adds up; add {MLP}experts: moe",
        ),
        (
            {MLP + "experts": "moe_tp_experts", **EXPERTS, MLP + "experts.gate_up_proj": "colwise"},
            "gate_up_proj and down_proj would be sharded along different features",
        ),
        (
            {MLP + "experts": "moe_tp_experts", MLP + "experts.gate_up_proj": "packed_colwise"},
            "gate_up_proj would be sharded, but not down_proj",
        ),
        (
            {MLP + "experts": "moe_tp_experts"},
            f"{MLP}experts: its output is replicated, and would be added up 3 times",
        ),
        (
            {LAYER + "mlp": "gather", **EXPERTS},
            f"{MLP}gate.weight: it is in a block with partial outputs that are summed, so its gradient has "
            "to be summed too",
        ),
        (
            {LAYER + "mlp": "gather", MLP + "experts": "moe_tp_experts", **EXPERTS},
            f"{MLP}experts: it sums its output, and {LAYER}mlp sums again",
        ),
        pytest.param(
            {MLP + "experts": "moe_all_to_all", **EXPERTS},
            f"{MLP}experts: moe_all_to_all sends tokens to ranks that hold complete experts, but gate_up_proj, "
            "down_proj would not be; make all of them local, or use moe_tp_experts",
            marks=needs("expert_parallel"),
        ),
        pytest.param(
            {MLP + "experts": "moe_all_to_all"},
            f"{MLP}experts: all ranks have the same tokens, of which there is nothing to exchange; use moe_tp_experts, "
            "or load with tp_sequence_parallel=True or tp_batch_sharded=True",
            marks=needs("expert_parallel", "sequence", "batch_sharded"),
        ),
    ],
)
def test_experts_that_are_not_added_up_once(rules, says) -> None:
    assert says in faults(rules, mixtral())


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            LOCAL,
            f"{MLP}down_proj: on every rank its output is a partial sum that nothing adds up; add gather around it",
        ),
        ({LAYER + "mlp": "gather"}, f"{LAYER}mlp: its output is replicated, and would be added up 3 times"),
        (
            {LAYER + "mlp": "gather", **GATED},
            f"{LAYER}mlp: its output is replicated, and would be added up 3 times",
        ),
        (
            {LAYER + "mlp": "all_reduce", **LOCAL, LAYER + "self_attn": "gather"},
            f"{LAYER}self_attn: its output is replicated",
        ),
        pytest.param(
            {"model.norm": "sharded_norm"},
            "model.norm: its input is replicated; use replicate",
            marks=needs("architectures"),
        ),
        (
            {"model.norm": "replicated_with_grad_allreduce"},
            "model.norm: its input is replicated, and so is its gradient, which would be counted 3 times",
        ),
    ],
)
def test_blocks_that_are_not_added_up_once(rules, says) -> None:
    assert says in faults(rules, llama())


def test_a_gate_and_an_up_are_split_as_they_are_stored() -> None:
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.experts.is_concatenated = False  # rows of the two alternate
    rules = {MLP + "experts": "moe_tp_experts", **EXPERTS}
    for strategy in ("colwise", "packed_colwise"):
        text = faults({**rules, MLP + "experts.gate_up_proj": strategy}, model)
        assert "gate_up_proj and down_proj would be sharded along different features" in text
    pairs = {MLP + "experts.gate_up_proj": {"strategy": "colwise", "unit": 2 * EXPERT_UNIT}}
    assert resolve(Plan.from_dict({**rules, **pairs}), model, 3)


def test_local_blocks_with_a_gather_are_accepted() -> None:
    assert resolve(Plan.from_dict({LAYER + "mlp": "gather", **LOCAL}), llama(), 2).module_strategies
    with pytest.raises(PlanError, match="nothing adds up"):  # a declared plan is completed for experts alone
        resolve(replace(Plan.from_dict(LOCAL), declared=True), llama(), 2)


class Scaled(nn.Module):
    """An activation with a number to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(width))


@pytest.mark.parametrize(("width", "rule"), [(1, "replicated_with_grad_allreduce"), (100, "sharded_norm")])
def test_what_stands_between_cut_linears_is_named(width, rule) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = Scaled(width)
    says = f"{MLP}act_fn.alpha: it is between linears with sharded features, and is replicated; "
    assert f"{says}add {MLP}act_fn: {rule}" in faults(GATED, model)
    if width == 1:
        assert resolve(Plan.from_dict({**GATED, MLP + "act_fn": rule}), model, 2)
        assert resolve(replace(Plan.from_dict(GATED), declared=True), model, 2).rule_names


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((8,), "it computes on sharded heads, so its gradient has to be summed"),  # as wide as a head
        ((64,), "shard it too (add model.layers.*.self_attn.extra: local_colwise, or sharded_norm"),
    ],
)
def test_what_stands_among_heads_is_summed_or_cut(shape, says) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(4, 2, hidden_size=64, head_dim=16))
    for layer in model.model.layers:
        layer.self_attn.extra = nn.RMSNorm(shape, device="meta")
    assert says in faults(HEADS, model)


SEQUENCE = {LAYER + "input_layernorm": "sequence_parallel", **GATED}


@needs("sequence")
def test_norms_of_a_sequence_that_no_rule_cuts_are_refused() -> None:
    said = faults(SEQUENCE, llama())
    assert f"{LAYER}input_layernorm: its input is replicated, since no rule shards the sequence" in said


class CutsSomehow(TensorParallelLayer):
    """A strategy that is not of the package: nothing is known of its output."""


class CutsAsBuiltIn(ReplicateParallel):
    """The same, by way of a strategy of the package."""


@needs("sequence")
@pytest.mark.parametrize("own", [CutsSomehow(), CutsAsBuiltIn()])
def test_strategies_of_a_user_may_cut_the_sequence(own) -> None:
    resolve(Plan.from_dict({**SEQUENCE, "model.embed_tokens": own}), llama(), 3)
