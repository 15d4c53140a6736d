"""Plans as data: parsing, matching, and every fault in one error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    MistralConfig,
    Qwen3Config,
)

from tests.support.models import llama_config
from tp_transformers import PlanError
from tp_transformers.anatomy import fold_layers
from tp_transformers.plans import Plan, Rule
from tp_transformers.plans.bind import Resolution, resolve
from tp_transformers.plans.rule import Pattern
from tp_transformers.plans.yaml_file import available_plans
from tp_transformers.slices.layout import Ranks
from tp_transformers.strategies import STRATEGIES, TensorParallelLayer

LAYER = "model.layers.*."
MEGATRON = {
    "model.embed_tokens": "embedding_rowwise",
    LAYER + "self_attn.q_proj": "colwise",
    LAYER + "self_attn.k_proj": "colwise",
    LAYER + "self_attn.v_proj": "colwise",
    LAYER + "self_attn.o_proj": "rowwise",
    LAYER + "mlp.gate_proj": "colwise",
    LAYER + "mlp.up_proj": "colwise",
    LAYER + "mlp.down_proj": "rowwise",
}


def meta_model(auto: Any = AutoModelForCausalLM, config: Any = None, **changes: Any) -> Any:
    with torch.device("meta"):
        return auto.from_config(config or llama_config(8, 4, **changes))


def faults(plan: Plan, model: Any = None, size: int = 2) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(plan, model if model is not None else meta_model(), size)
    return str(caught.value)


def layout(resolution: Resolution, name: str, model: Any, size: int) -> Any:
    """Who holds what of a parameter."""
    return resolution.param_strategies[name].layout("weight", model.get_parameter(name).shape, size)


def plan_of(tmp_path: Path, text: str, name: str = "mine.yaml") -> Plan:
    (tmp_path / name).write_text(text)
    return Plan.from_yaml(tmp_path / name)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
def test_the_llama_plan_covers_every_parameter_of_every_head_class(auto) -> None:
    model = meta_model(auto)
    plan = Plan.for_model(model)
    resolution = resolve(plan, model, 2)
    assert resolution.uncovered == ()
    assert set(resolution.param_strategies) == {name for name, _ in model.named_parameters()}
    assert resolution.notes == ()


def test_names_match_as_a_whole_and_stars_are_layer_numbers() -> None:
    others = ["model.layers.1.mlp", "layers.1.mlp.up", "layers.x.mlp", "layers.1.2.mlp", "layersX1Xmlp"]
    assert list(Pattern("layers.*.mlp").match(["layers.12.mlp", *others], "model")) == ["layers.12.mlp"]
    assert list(Pattern("layers.*.mlp", in_base_model=True).match(others, "model")) == ["model.layers.1.mlp"]
    assert fold_layers("model.layers.10.experts.3.w1.weight") == "model.layers.*.experts.*.w1.weight"


def test_a_manual_dict_cuts_whole_heads_and_leaves_the_rest() -> None:
    resolution = resolve(Plan.from_dict(MEGATRON), meta_model(), 3)
    widths = {role: resolution.layouts[f"model.layers.0.self_attn.{role}_proj.weight"].split.widths for role in "qkvo"}
    assert widths == {"q": (32, 16, 16), "k": (16, 8, 8), "v": (16, 8, 8), "o": (32, 16, 16)}
    assert {fold_layers(name) for name in resolution.uncovered} == {
        "model.layers.*.input_layernorm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_every_fault_is_told_at_once_with_the_nearest_names() -> None:
    plan = Plan.from_dict(
        {
            **MEGATRON,
            "model.embed_tokens": "embeding_rowwise",
            LAYER + "mlp.gate_prj": "colwise",
            "model.layers.0.mlp.up_proj": "rowwise",
            "model.norm": "colwise",
        }
    )
    text = faults(plan)
    assert text.startswith("tp_plan does not fit LlamaForCausalLM, 4 faults:")
    assert "model.embed_tokens: unknown strategy 'embeding_rowwise' (nearest: embedding_rowwise" in text
    assert "model.layers.*.mlp.gate_prj: matches no module" in text
    assert "nearest: model.layers.*.mlp.gate_proj" in text
    assert "model.layers.0.mlp.up_proj: two rules match it" in text
    assert "model.norm: a LlamaRMSNorm is no linear or embedding" in text


def test_extends_replaces_removes_and_adds_rules(tmp_path) -> None:
    plan = plan_of(
        tmp_path,
        "extends: llama\nmodel_type: [llama, mine]\n"
        "base_model: {embed_tokens: embedding_colwise, norm: null}\nheads: {lm_head: null, extra: replicate}\n",
    )
    llama = Plan.from_yaml(available_plans()["llama"])
    mine, theirs = plan.as_dict("model"), llama.as_dict("model")
    assert mine.pop("model.embed_tokens") == "embedding_colwise"
    assert mine.pop("extra") == "replicate"
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        del theirs[name]
    assert mine == theirs
    assert plan.entries == plan.attention == llama.attention
    assert plan.model_types == ("llama", "mine")
    assert plan.source.endswith("mine.yaml")
    assert resolve(plan, meta_model(), 2).uncovered == ("model.norm.weight", "lm_head.weight")


def test_a_plan_for_another_architecture() -> None:
    plan = Plan.from_yaml(available_plans()["llama"])
    mistral = MistralConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    text = faults(plan, meta_model(config=mistral))
    assert "is for llama, the model is a mistral" in text


def test_tied_parameters_have_to_be_cut_alike() -> None:
    text = faults(Plan.from_dict({"lm_head": "colwise_rep"}), meta_model(tie_word_embeddings=True))
    assert "lm_head.weight: tied to model.embed_tokens.weight" in text
    assert "dim 0 into (100, 99)" in text


def test_a_declared_plan_splits_the_embedding_with_the_head_that_is_tied_to_it() -> None:
    plan = replace(Plan.from_dict({"lm_head": "colwise_rep"}), declared=True).with_options(allow_replicated=True)
    for is_tied, rule in ((True, "embedding_rowwise"), (False, None)):
        names = resolve(plan, meta_model(tie_word_embeddings=is_tied), 2).rule_names
        assert names.get("model.embed_tokens.weight") == rule


@pytest.mark.parametrize("module_rule", [{}, {LAYER + "mlp.up_proj": "colwise"}])
def test_a_rule_for_the_parameter_of_a_linear_is_sent_to_the_module(module_rule) -> None:
    text = faults(Plan.from_dict({**module_rule, LAYER + "mlp.up_proj.weight": "colwise"}))
    assert "name the module, model.layers.*.mlp.up_proj: colwise" in text


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({LAYER + "mlp": "rowwise"}, "model.layers.*.mlp: a LlamaMLP is no linear"),
        ({LAYER + "mlp.act_fn": "rowwise"}, "model.layers.*.mlp.act_fn: a SiLU"),
        ({"model.layers.*": "colwise"}, "model.layers.*: a LlamaDecoderLayer is no linear"),
        ({"": "colwise"}, "the model: a LlamaForCausalLM is no linear"),
        ({"lm_head": "colwise"}, "lm_head: each rank would return its own shard"),
        (
            {"model.embed_tokens": {"strategy": "packed_rowwise", "parts": [100, 99]}},
            "model.embed_tokens: ",
        ),
        ({"model.norm": {"strategy": "replicate", "parts": 2}}, "replicate takes no parts"),
        ({"lm_head": STRATEGIES["colwise_rep"].with_shares((2, 1))}, "lm_head: with_shares is for parallelize_module"),
        ({LAYER + "mlp.up_proj": {"strategy": "packed_colwise", "parts": [-1, 101]}}, LAYER + "mlp.up_proj.weight: "),
        ({LAYER + "mlp.up_proj": {"strategy": "packed_colwise", "parts": [0, 100]}}, LAYER + "mlp.up_proj.weight: "),
        ({LAYER + "mlp.up_proj": {"strategy": "packed_colwise", "parts": []}}, LAYER + "mlp.up_proj.weight: "),
    ],
)
def test_rules_that_would_compute_something_else(rules, says) -> None:
    assert says in faults(Plan.from_dict(rules))


def test_norms_among_heads_that_are_cut_have_to_sum_their_gradients() -> None:
    config = Qwen3Config(
        vocab_size=99, hidden_size=32, head_dim=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = meta_model(config=config)
    text = faults(Plan.from_dict(MEGATRON), model)
    assert "2 faults" in text
    assert "add model.layers.*.self_attn.q_norm: replicated_with_grad_allreduce" in text
    norms = {LAYER + f"self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
    assert resolve(Plan.from_dict({**MEGATRON, **norms}), model, 2).param_strategies
    declared = resolve(replace(Plan.from_dict(MEGATRON), declared=True), model, 2).rule_names
    assert {declared[f"model.layers.0.self_attn.{name}_norm.weight"] for name in "qk"} == set(norms.values())


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        ("{layers.*.attn: {query: q_proj}}", "attention model.layers.*.attn: matches no module"),
        ("{layers.*.self_attn: {query: wq}}", "no child 'wq'"),
    ],
)
def test_attention_that_is_not_there(tmp_path, attention, says) -> None:
    plan = plan_of(tmp_path, f"base_model: {{layers.*.self_attn.q_proj: colwise}}\nattention: {attention}\n")
    text = faults(plan, size=3)
    assert text.startswith(f"plan {tmp_path}/mine.yaml does not fit LlamaForCausalLM")
    assert says in text
    assert "does not say where the heads" not in text


def test_projections_that_are_cut_by_heads_have_no_parts() -> None:
    rules = {**MEGATRON, LAYER + "self_attn.q_proj": {"strategy": "packed_colwise", "parts": 2}}
    assert f"- {LAYER}self_attn.q_proj: attention splits it by heads, as query" in faults(Plan.from_dict(rules), size=3)


def test_heads_that_do_not_group() -> None:
    model = meta_model()
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(64, 24, device="meta")
    assert "model.layers.1.self_attn: 8 query heads are not a multiple of 3" in faults(Plan.from_dict(MEGATRON), model)


def test_more_ranks_than_heads_replicates_attention_with_one_note() -> None:
    model = meta_model(num_attention_heads=2, num_key_value_heads=1)
    plan = Plan.for_model(model)
    resolution = resolve(plan, model, 4)
    assert len(resolution.notes) == 1
    assert "model.layers.*.self_attn: 4 ranks are more than the heads" in resolution.notes[0]
    for name in ("q", "k", "v", "o"):
        layer = f"model.layers.0.self_attn.{name}_proj"
        assert layout(resolution, f"{layer}.weight", model, 4) is None
    assert layout(resolution, "model.layers.0.mlp.up_proj.weight", model, 4).split.widths == (25, 25, 25, 25)


GATHERED = {"q_proj": "colwise_rep", "k_proj": "colwise_rep", "v_proj": "colwise_rep", "o_proj": "rowwise_rep"}


def test_projections_that_are_gathered_are_not_cut_by_heads() -> None:
    rules = {LAYER + "self_attn." + name: strategy for name, strategy in GATHERED.items()}
    model = meta_model(num_key_value_heads=2)
    resolution = resolve(Plan.from_dict(rules), model, 4)
    assert not resolution.attention
    assert layout(resolution, "model.layers.0.self_attn.k_proj.weight", model, 4).split.widths == (4,) * 4


def test_projections_that_do_not_fit_together() -> None:
    rules = {LAYER + "self_attn.q_proj": "colwise", LAYER + "self_attn.k_proj": "colwise_rep"}
    text = faults(Plan.from_dict(rules))
    assert (
        "attention model.layers.*.self_attn: q_proj leave their features sharded, k_proj, o_proj, v_proj do not" in text
    )


def test_attention_that_is_not_recognised_is_cut_only_where_its_heads_divide() -> None:
    config = GPTNeoXConfig(
        vocab_size=99, hidden_size=48, num_hidden_layers=1, num_attention_heads=6, intermediate_size=64
    )
    model = meta_model(config=config)
    rules = {
        "gpt_neox.layers.*.attention.query_key_value": "colwise",
        "gpt_neox.layers.*.attention.dense": "rowwise",
    }
    assert resolve(Plan.from_dict(rules), model, 3).uncovered
    text = faults(Plan.from_dict(rules), model, 4)
    assert "1 fault" in text
    assert "the heads of query_key_value are, so they can be split for 1 or 2 or 3 or 6 ranks, not for 4" in text


def test_an_unknown_strategy_in_a_declared_plan_is_a_fault() -> None:
    model = meta_model()
    plan = Plan("declared", (Rule("model.norm", strategy="from_the_future", optional=True),), declared=True)
    text = faults(plan, model)
    assert "model.norm: unknown strategy 'from_the_future' (nearest: " in text
    assert text.endswith("); import the file that registers your own first (--import in commands)")


def fused(parts: Any, size: int = 3, head_dim: int = 8) -> Resolution:
    """A Llama whose query, key and value (or gate and up) projections are one."""
    model = meta_model(head_dim=head_dim)
    for layer in model.model.layers:
        layer.self_attn.qkv_proj = torch.nn.Linear(64, (8 + 4 + 4) * head_dim, bias=False, device="meta")
        del layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
    data = {
        "rules": {
            LAYER + "self_attn.qkv_proj": {"strategy": "packed_colwise", "parts": parts},
            LAYER + "self_attn.o_proj": "rowwise",
        },
        "attention": {"layers.*.self_attn": {"fused": "qkv_proj", "output": "o_proj"}} if parts[0] == "query" else {},
    }
    return resolve(Plan.parse(data, source="fused"), model, size)


def test_fused_attention_parts_are_cut_by_their_heads() -> None:
    layout = fused(["query", "key", "value"]).layouts["model.layers.0.self_attn.qkv_proj.weight"]
    split = layout.split
    assert split.ranges[0] == ((0, 32), (64, 80), (96, 112))
    assert split.ranges[2] == ((48, 64), (88, 96), (120, 128))
    assert fused(["query", "key", "value"], head_dim=1).attention["model.layers.0.self_attn"].query.length == 8


def test_fused_parts_by_length() -> None:
    strategy = fused([64, 32, 32], size=4).module_strategies["model.layers.0.self_attn.qkv_proj"]
    split = strategy.layout("weight", (128, 64), 4).split
    assert split.ranges[0] == ((0, 16), (64, 72), (96, 104))


def test_fused_parts_that_do_not_add_up() -> None:
    with pytest.raises(PlanError, match="weight along dim 0: it has length 128, its parts add up to 96"):
        fused([64, 32], size=4)


def test_shares_are_a_number_for_each_rank() -> None:
    plan = Plan("mine", (), shares=(2, 1))
    assert plan.ranks(2) == Ranks(2, (2, 1))
    with pytest.raises(PlanError, match=r"tp_shares: got 2 shares.* as many numbers"):
        plan.ranks(3)


def test_strategies_are_a_mapping_that_takes_classes_and_instances() -> None:
    class Mine(TensorParallelLayer):
        pass

    STRATEGIES.register_strategy("mine", Mine)
    try:
        assert isinstance(STRATEGIES["mine"], Mine)
        assert "mine" in list(STRATEGIES)
        assert Plan.from_dict({"model.norm": "mine"}).rules[0].strategy == "mine"
    finally:
        del STRATEGIES["mine"]
    assert STRATEGIES.get("mine") is None
    with pytest.raises(PlanError, match="strategy 'bad'"):
        STRATEGIES.register_strategy("bad", dict)  # type: ignore[arg-type]
