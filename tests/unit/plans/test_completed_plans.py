"""Rules that a plan has without a line of their own: those that attention implies, and those that a class declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.models import llama_config
from tests.support.needs import needs
from tests.support.tiny import TEXTS
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

LAYER = "model.layers.0.self_attn."
ATTENTION = "attention:\n  layers.*.self_attn: {query: q_proj, key: k_proj, value: v_proj, output: o_proj}\n"


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def plan_of(tmp_path: Path, text: str) -> Plan:
    (tmp_path / "plan.yaml").write_text(text)
    return Plan.from_yaml(tmp_path / "plan.yaml")


def rules_of(plan: Plan, model: Any) -> dict[str, str]:
    """Parameters of the first layer's attention -> the names of their rules."""
    names = resolve(plan, model, 2).rule_names
    return {name.removeprefix(LAYER).removesuffix(".weight"): rule for name, rule in names.items() if LAYER in name}


def test_attention_implies_the_rules_of_its_projections(tmp_path) -> None:
    plan = plan_of(tmp_path, f"model_type: llama\n{ATTENTION}")
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
    assert rules_of(plan, on_meta(llama_config(8, 4))) == {**columns, "o_proj": "rowwise"}


def test_attention_that_is_gathered_has_all_heads_on_every_rank(tmp_path) -> None:
    plan, model = (
        plan_of(tmp_path, f"model_type: llama\n{ATTENTION[:-2]}, gathered: true}}"),
        on_meta(llama_config(8, 4)),
    )
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_rep")
    assert rules_of(plan, model) == {**columns, "o_proj": "rowwise_rep"}
    assert not resolve(plan, model, 3).attention


def test_heads_in_blocks_are_cut_in_every_block(tmp_path) -> None:
    blocks = "blocks: {query: 2, key: 2, value: 2, output: 2}"
    plan = plan_of(tmp_path, f"model_type: llama\n{ATTENTION[:-2]}, {blocks}}}")
    heads = resolve(plan, on_meta(llama_config(8, 4)), 2).attention[LAYER[:-1]]
    assert heads.query.ranges == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert heads.kv.ranges == (((0, 1), (2, 3)), ((1, 2), (3, 4)))
    with pytest.raises(PlanError, match="9 query and 3 key/value heads are not those of 2 blocks"):
        resolve(plan, on_meta(llama_config(9, 3)), 2)
    with pytest.raises(PlanError, match=r"blocks is .*, not one number for some of its roles"):
        plan_of(tmp_path, f"model_type: llama\n{ATTENTION[:-2]}, blocks: {{query: 2, key: 3}}}}")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("base_model: {layers.*.self_attn.o_proj: replicate}", {"*": "replicate"}),
        ("rules: {model.layers.*.self_attn.o_proj: replicate}", {"*": "replicate"}),
        ("rules: {model.layers.0.self_attn.o_proj: replicate}", {"0": "replicate", "1": "rowwise"}),
    ],
)
def test_a_rule_of_the_plan_comes_before_an_implied_one(tmp_path, own, expected) -> None:
    plan = plan_of(tmp_path, f"model_type: llama\n{own}\n{ATTENTION}").completed(on_meta(llama_config(8, 4)))
    found = {name: rule for name, rule in plan.as_dict("model").items() if name.endswith("o_proj")}
    assert found == {f"model.layers.{layer}.self_attn.o_proj": rule for layer, rule in expected.items()}


def test_null_takes_an_implied_rule_away(tmp_path) -> None:
    taken = ", ".join(f"layers.*.self_attn.{each}_proj: null" for each in "qkvo")
    plan = plan_of(tmp_path, f"model_type: llama\nextends: llama\nbase_model: {{{taken}}}")
    assert rules_of(plan, on_meta(llama_config(8, 4))) == {}


def test_attention_that_is_taken_away_takes_its_implied_rules_along(tmp_path) -> None:
    plan = plan_of(tmp_path, "model_type: llama\nextends: llama\nattention: {layers.*.self_attn: null}")
    assert rules_of(plan, on_meta(llama_config(8, 4))) == {}


def test_a_plan_completes_what_the_class_declares(tmp_path) -> None:
    model = on_meta(llama_config(8, 4))
    declared = dict(model._tp_plan)
    assert declared
    text = "model_type: llama\nextends: declared\nbase_model: {norm: replicate}"
    completed = plan_of(tmp_path, text).completed(model)
    assert completed.as_dict("model") == {"model.norm": "replicate", **declared}
    assert completed.completed(model) == completed


@needs("architectures")
def test_a_plan_that_completes_is_taken_for_its_type() -> None:
    model = TEXTS["granitemoe"].make()
    plan = Plan.for_model(model)
    assert plan.declared
    assert resolve(plan, model, 2).rule_names[f"{LAYER}q_proj.weight"] == "colwise"


def test_a_rule_of_the_plan_comes_before_a_declared_one(tmp_path) -> None:
    model = TEXTS["granitemoe"].make()
    text = "model_type: granitemoe\nextends: declared\nrules: {lm_head: colwise_rep}"
    plan = plan_of(tmp_path, text).with_options(allow_replicated=True)
    assert resolve(plan, model, 2).plan.as_dict()["lm_head"] == "colwise_rep"


@needs("architectures")
@pytest.mark.parametrize(("size", "expected"), [(2, (24, 16)), (3, (16, 16, 8)), (7, None)])
def test_projections_in_two_modules_are_cut_by_the_same_heads(size, expected) -> None:
    model = TEXTS["bert"].make()  # its output projection is not in the module that attends
    plan = Plan.for_model(model)
    resolution = resolve(plan, model, size)
    for name in ("attention.self.query", "attention.self.value", "attention.output.dense"):
        layout = resolution.layouts[f"bert.encoder.layer.0.{name}.weight"]
        assert (None if layout is None else layout.split.widths) == expected
    assert list(resolution.attention) == (
        [] if expected is None else [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]
    )


@needs("architectures")
def test_heads_of_experts_attend_once_per_expert_of_a_token() -> None:
    model = TEXTS["jetmoe"].make()
    plan = Plan.for_model(model)
    heads = next(iter(resolve(plan, model, 2).attention.values()))
    assert (heads.query.length, heads.repeats) == (5, 2)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4Config"), reason="transformers has no Gemma 4 yet")
def test_rules_of_a_plan_that_completes_a_declared_one_come_before_those_of_its_parts() -> None:
    model_class: Any = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = model_class.from_config(transformers.Gemma4Config())
    plan = Plan.for_model(model)
    names = resolve(plan, model, 2).rule_names
    assert names["model.language_model.embed_tokens.weight"] == "replicate"
    assert names["model.language_model.layers.0.mlp.up_proj.weight"] == "colwise"
    assert names["model.language_model.embed_tokens_per_layer.weight"] == "embedding_rowwise"
