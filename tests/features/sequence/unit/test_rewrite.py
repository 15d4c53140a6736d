"""The options of a plan: what they make of its rules, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaForCausalLM, PreTrainedModel

from tests.features.sequence.distributed.test_sequence_parallel import UNFIT
from tests.support.architectures import ARCHITECTURES
from tests.support.models import llama_config
from tests.support.needs import needs
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

pytestmark = needs("sequence", "loss_parallel", "batch_sharded", "expert_parallel", "invariant")

LAYER = "model.layers.*."


def llama(heads: int = 8, kv_heads: int = 4) -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(heads, kv_heads))


def rules_of(model: PreTrainedModel, plan: Plan | None = None, **options: Any) -> dict[str, str]:
    plan = plan or Plan.for_model(model)
    return resolve(plan.with_options(**options), model, 2).plan.as_dict("model")


def test_llama_with_both_options() -> None:
    plain = rules_of(llama())
    cut = rules_of(llama(), sequence_parallel=True, loss_parallel=True)
    changed = {name: strategy for name, strategy in cut.items() if plain.get(name) != strategy}
    assert changed == {
        "": "loss_parallel",
        "model": "sequence_states",
        "model.layers.0": "sequence_scatter",
        LAYER + "input_layernorm": "sequence_parallel",
        LAYER + "self_attn": "sequence_gather",
        **dict.fromkeys((LAYER + f"self_attn.{name}_proj" for name in "qkv"), "local_colwise"),
        LAYER + "self_attn.o_proj": "local_rowwise",
        LAYER + "post_attention_layernorm": "sequence_parallel",
        LAYER + "mlp": "sequence_gather",
        LAYER + "mlp.gate_proj": "local_colwise",
        LAYER + "mlp.up_proj": "local_colwise",
        LAYER + "mlp.down_proj": "local_rowwise",
        "model.norm": "sequence_parallel_rep",
        "lm_head": "colwise_loss",
    }
    assert plain.keys() <= cut.keys()


def test_layers_of_one_stack_may_differ() -> None:
    rules = rules_of(ARCHITECTURES["qwen3_moe"].make(8, 4), sequence_parallel=True)
    assert rules["model.layers.0.mlp"] == "sequence_gather"  # dense
    assert rules["model.layers.1.mlp"] == "sequence_whole"  # a router, and experts that sum by themselves
    assert rules[LAYER + "mlp.experts"] == "moe_tp_experts"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sequence_parallel: true", "pass tp_sequence_parallel=True to from_pretrained"),
        ("loss_parallel: true", "pass tp_loss_parallel=True to from_pretrained"),
        ("invariant: true", "pass tp_invariant=True to from_pretrained"),
        ("batch_sharded: [model.layers.*.mlp]", r"pass tp_batch_sharded=\['model.layers.\*.mlp'\] to from_pretrained"),
        ("expert_parallel: alone", "pass tp_expert_parallel='alone' to from_pretrained"),
        ("shares: [2, 1, 1]", r"pass tp_shares=\[2, 1, 1\] to from_pretrained"),
        ("rules: {model.layers.*.mlp: {input: batch-sharded}}", r"name the module in tp_batch_sharded=\[...\] instead"),
    ],
)
def test_a_plan_file_with_an_argument_of_a_load_is_refused(tmp_path, line, says) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: llama\n{line}\n")
    with pytest.raises(PlanError, match=rf"mine.yaml is malformed, 1 fault:\n.*{says}"):
        Plan.from_yaml(tmp_path / "mine.yaml")


def test_a_dict_is_rewritten_by_what_its_rules_do() -> None:
    mlp = LAYER + "mlp."
    local = {mlp + "gate_proj": "local_colwise", mlp + "up_proj": "local_colwise", mlp + "down_proj": "local_rowwise"}
    heads = {LAYER + f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {LAYER + "self_attn.o_proj": "rowwise"}
    plan = Plan.from_dict({**heads, LAYER + "mlp": "gather", **local})
    rules = rules_of(llama(), plan, sequence_parallel=True)
    assert rules[LAYER + "mlp"] == rules[LAYER + "self_attn"] == "sequence_gather"
    assert rules["model.norm"] == "sequence_parallel_rep"


def test_attention_with_fewer_heads_than_ranks_computes_the_whole() -> None:
    plan = Plan.for_model(llama(2, 1)).with_options(sequence_parallel=True)
    strategies = resolve(plan, llama(2, 1), 3).module_strategies
    assert type(strategies["model.layers.0.self_attn"]).__name__ == "SequenceReplicatedParallel"
    assert type(strategies["model.layers.0.mlp"]).__name__ == "SequenceGatherParallel"


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_such_decoder_is_refused(name) -> None:
    model = ARCHITECTURES[name].make(*ARCHITECTURES[name].variants[0])
    with pytest.raises(PlanError, match="cannot be made sequence-parallel") as caught:
        resolve(Plan.for_model(model).with_options(sequence_parallel=True), model, 2)
    assert str(caught.value).count("\n") <= 2


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 1, 3, device="meta"))


def with_a_convolution() -> PreTrainedModel:
    model = llama()
    model.model.layers[1].mixer = Convolution()
    return model


def with_a_scale() -> PreTrainedModel:
    model = llama()
    model.model.layers[0].scale = nn.Parameter(torch.empty(64, device="meta"))
    return model


def with_two_ends() -> PreTrainedModel:
    model = llama()
    model.model.projection = nn.Linear(64, 64, device="meta")
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_a_convolution, r"layers.\*.mixer: it is neither a norm nor a block"),
        (with_a_scale, r"layers.\*: it has parameters of its own"),
        (with_two_ends, "it has model.norm, model.projection after model.layers, where one norm is"),
    ],
)
def test_modules_that_may_mix_tokens_are_refused(make, says) -> None:
    with pytest.raises(PlanError, match=says):
        rules_of(make(), sequence_parallel=True)


def test_a_model_without_a_causal_loss_is_refused() -> None:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**settings, vocab_size=20))
    with pytest.raises(PlanError, match=r"loss_parallel: got BertForMaskedLM, no rule .*, another loss"):
        rules_of(model, Plan.from_dict({"bert.encoder.layer.*.intermediate.dense": "colwise_rep"}), loss_parallel=True)
    plan = Plan.parse({"extends": "llama", "heads": {"lm_head": "replicate"}}, source="mine")
    with pytest.raises(PlanError, match="lm_head: replicate, its loss"):
        rules_of(llama(), plan, loss_parallel=True)


EXCHANGE = {"layers.*.mlp.experts": "moe_all_to_all"} | {
    f"layers.*.mlp.experts.{name}_proj": "grouped_gemm" for name in ("gate_up", "down")
}


def exchanging(kind: str, **rules: Any) -> Plan:
    return Plan.parse({"extends": kind, "optional": {**EXCHANGE, **rules}}, source="mine")


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe"])
def test_blocks_with_experts_that_exchange_tokens_compute_on_parts(kind) -> None:
    model = ARCHITECTURES[kind].make(8, 8)
    shared = LAYER + ("mlp.shared_experts" if kind == "deepseek_v3" else "mlp.shared_expert")
    rules = rules_of(model, exchanging(kind), sequence_parallel=True)
    last = f"model.layers.{len(model.model.layers) - 1}.mlp"
    assert rules.get(last, rules.get(LAYER + "mlp")) is None
    assert rules[LAYER + "mlp.experts"] == "moe_all_to_all"
    assert rules[LAYER + "mlp.gate"] == "sequence_parallel"
    assert rules[shared] == "sequence_gather"
    assert rules[shared + ".down_proj"] == "local_rowwise"
    rules = rules_of(model, exchanging(kind), batch_sharded=(LAYER + "mlp",))
    assert rules[LAYER + "mlp.experts"] == f"moe_all_to_all, {BLOCK}"
    assert rules[LAYER + "mlp.gate"] == rules[LAYER + "self_attn.q_b_proj" if kind == "deepseek_v3" else "lm_head"]
    assert rules[LAYER + "mlp.gate"] == "replicate"
    assert rules[shared] == BLOCK


@pytest.mark.parametrize(
    ("kind", "changes", "rules", "says"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, {}, r"layers.\*.mlp: it draws random numbers for tokens, .* jitter"),
        ("mixtral", {}, {"layers.*.mlp.experts.down_proj": "rowwise"}, "but not of down_proj; make all of them"),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, {}, "1 experts cannot be spread over 2 ranks"),
    ],
)
def test_experts_that_cannot_exchange_tokens_are_refused(kind, changes, rules, says) -> None:
    config = ARCHITECTURES[kind].make(8, 4).config
    config.update(changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(PlanError, match=says):
        rules_of(model, exchanging(kind, **rules), sequence_parallel=True)


@pytest.mark.parametrize("name", ["sequence_parallel", "sequence_parallel_rep"])
def test_a_norm_on_parts_that_nothing_cuts_is_refused(name) -> None:
    plan = Plan.from_dict({LAYER + "input_layernorm": name})
    with pytest.raises(PlanError, match=r"input_layernorm: its input is replicated, since no rule shards"):
        resolve(plan, llama(), 2)
    resolve(plan, llama(), 1)


# -- batches of each rank's own

BLOCK = "input: batch-sharded"


def test_what_gathers_batches_is_cut_and_nothing_else() -> None:
    plain, cut = rules_of(llama()), rules_of(llama(), batch_sharded=True)
    changed = {name: strategy for name, strategy in cut.items() if plain.get(name) != strategy}
    assert changed == {
        "model": "holds samples of its own",
        "model.embed_tokens": "replicate",
        LAYER + "self_attn": BLOCK,
        **dict.fromkeys((LAYER + f"self_attn.{name}_proj" for name in "qkv"), "local_colwise"),
        LAYER + "self_attn.o_proj": "local_rowwise",
        LAYER + "mlp": BLOCK,
        LAYER + "mlp.gate_proj": "local_colwise",
        LAYER + "mlp.up_proj": "local_colwise",
        LAYER + "mlp.down_proj": "local_rowwise",
        "lm_head": "replicate",
    }


def test_lists_choose_what_gathers_batches() -> None:
    rules = rules_of(llama(), batch_sharded=(LAYER + "mlp", "lm_head"))
    assert rules[LAYER + "mlp"] == BLOCK
    assert rules[LAYER + "self_attn.q_proj"] == rules[LAYER + "self_attn.o_proj"] == "replicate"
    assert rules["lm_head"] == f"colwise_rep, {BLOCK}"
    rules = rules_of(llama(), batch_sharded=("model.layers.1.mlp",))
    assert rules["model.layers.1.mlp"] == BLOCK
    assert rules["model.layers.0.mlp.up_proj"] == "replicate"


def test_attention_with_fewer_heads_than_ranks_gathers_batches_whole() -> None:
    strategies = resolve(Plan.for_model(llama(2, 1)).with_options(batch_sharded=True), llama(2, 1), 3).module_strategies
    assert type(strategies["model.layers.0.self_attn"]).__name__ == "BatchReplicated"
    assert type(strategies["model.layers.0.mlp"]).__name__ == "BatchGather"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"batch_sharded": ("model.layer.*.mlp",)},
            r"model.layer.\*.mlp: matches no module .nearest: model.layers.\*.mlp",
        ),
        (
            {"batch_sharded": (LAYER + "input_layernorm",)},
            r"input_layernorm: no rules in it shard features and sum them",
        ),
        (
            {"batch_sharded": (LAYER + "mlp.down_proj",)},
            r"down_proj: no rules in it .* its own is none of colwise_rep, ",
        ),
        ({"batch_sharded": (LAYER + "mlp", LAYER[:-1])}, r"mlp: it is in another module whose input is"),
        ({"batch_sharded": True, "sequence_parallel": True}, "got batch_sharded and sequence_parallel, expected one"),
        ({"batch_sharded": True, "loss_parallel": True}, "got batch_sharded and loss_parallel, expected one"),
    ],
)
def test_what_cannot_gather_batches_is_refused(options, says) -> None:
    with pytest.raises(PlanError, match=says):
        rules_of(llama(), **options)


def test_models_without_what_could_gather_batches_are_refused() -> None:
    with pytest.raises(PlanError, match="mlp: no rules in it shard"):
        rules_of(llama(), Plan.from_dict({LAYER + "mlp": "replicate"}), batch_sharded=(LAYER + "mlp",))
    with pytest.raises(PlanError, match="it has no attention, MLP or experts that rules shard"):
        rules_of(llama(), Plan.from_dict({"model.norm": "replicate"}), batch_sharded=True)
    model = ARCHITECTURES["t5"].make(8, 8)
    with pytest.raises(PlanError, match="it has an encoder and a decoder"):
        rules_of(model, batch_sharded=True)


def mixture() -> Any:
    return ARCHITECTURES["gpt_oss"].make(8, 4)


EXPERTS = LAYER + "mlp.experts"


def test_expert_parallel_plans_keep_experts_complete() -> None:
    usual, rules = rules_of(mixture()), rules_of(mixture(), expert_parallel=True)
    parameters = {name for name in usual if name.startswith(f"{EXPERTS}.")}
    assert len(parameters) == 4
    assert {rules[name] for name in parameters} == {"grouped_gemm"}
    assert {name: rule for name, rule in rules.items() if name not in parameters} == {
        name: rule for name, rule in usual.items() if name not in parameters
    }
    layouts = resolve(Plan.for_model(mixture()).with_options(expert_parallel=True), mixture(), 3).layouts
    for name in (name for name in layouts if ".mlp.experts." in name):
        assert layouts[name].dim == 0
        assert layouts[name].split.widths == (2, 1, 1)


def test_all_but_experts_can_be_replicated() -> None:
    rules = rules_of(mixture(), expert_parallel="alone")
    assert rules.pop(EXPERTS) == "moe_tp_experts"
    assert {rules.pop(name) for name in list(rules) if name.startswith(EXPERTS)} == {"grouped_gemm"}
    assert set(rules.values()) == {"replicate"}


def test_experts_exchange_tokens_of_sequences_and_batches() -> None:
    assert rules_of(mixture(), expert_parallel=True, sequence_parallel=True)[EXPERTS] == "moe_all_to_all"
    for batch in ("experts", True):
        rules = rules_of(mixture(), expert_parallel=True, batch_sharded=batch)
        assert rules[EXPERTS] == "moe_all_to_all, input: batch-sharded"
        assert rules[LAYER + "self_attn.q_proj"] == ("replicate" if batch == "experts" else "local_colwise")


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (llama, {"expert_parallel": True}, "it has no experts with parameters .experts, out, in. that rules shard"),
        (mixture, {"batch_sharded": "experts"}, "no experts with a rule moe_all_to_all; expert_parallel gives them"),
    ],
)
def test_models_without_such_experts_are_refused(model, options, says) -> None:
    with pytest.raises(PlanError, match=says):
        rules_of(model(), **options)


def test_other_rules_for_experts_are_refused() -> None:
    whole = {f"{EXPERTS}": "replicate", f"{EXPERTS}.down_proj": "rowwise", f"{EXPERTS}.gate_up_proj": "packed_colwise"}
    with pytest.raises(PlanError, match=r"mlp\.experts: replicate is a rule for experts; they need moe_tp_experts"):
        rules_of(ARCHITECTURES["mixtral"].make(8, 4), Plan.from_dict(whole), expert_parallel=True)
