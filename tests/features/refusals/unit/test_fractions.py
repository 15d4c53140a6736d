"""Declared plans that leave whole layers on every rank."""

from dataclasses import replace

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tests.features.refusals.unit.test_widths import meta_model
from tests.support.fractions import largest_fraction
from tests.support.models import llama_config
from tp_transformers import PlanError
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve


def test_a_declared_plan_that_cuts_no_layer_is_refused_with_its_share() -> None:
    model, plan = meta_model(), replace(Plan.from_dict({"lm_head": "colwise_rep"}, source="the plan"), declared=True)
    head = 199 * 64
    whole = sum(param.numel() for param in model.parameters())
    share = (whole - head + 100 * 64) / whole  # rank 0 holds 100 of 199 rows
    with pytest.raises(PlanError) as caught:
        resolve(plan, model, 2)
    assert f"shards a matrix of model.layers.*, so that each of 2 ranks would hold {share:.0%} of the model" in str(
        caught.value
    )
    assert "allow_replicated=True" in str(caught.value)
    assert resolve(plan, model, 1).notes == ()
    allowed = resolve(plan.with_options(allow_replicated=True), model, 2)
    assert largest_fraction(model, allowed.layouts, 2) == pytest.approx(share)
    (note,) = allowed.notes
    assert f"{1 - head / whole:.0%} of the model is on every rank, and the largest of 2 ranks holds {share:.0%}" in note
    assert resolve(replace(plan, declared=False), model, 2).notes == ()


def test_a_declared_plan_that_leaves_a_tower_loads_with_its_share(tmp_path) -> None:
    config = LlavaConfig(
        vision_config={
            "model_type": "vit_msn",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        text_config=llama_config(8, 2),
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    plan = Plan.for_model(model)
    assert plan.declared
    (note,) = resolve(plan, model, 2).notes
    assert "replicates 2 of 2 model.vision_tower." in note
    assert plan.inner_models == ("model.language_model",)
    assert plan.as_dict()["lm_head"] == "colwise_rep"  # of the plan for the language model
    (tmp_path / "own.yaml").write_text("rules: {model.language_model.norm: replicate}")
    own = Plan.for_model(model, tmp_path / "own.yaml")
    assert own.as_dict() == {"model.language_model.norm": "replicate"}


def test_a_declared_plan_that_leaves_some_layers_is_told() -> None:
    rules = {f"model.layers.0.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
    plan = replace(
        Plan.from_dict({**rules, "model.layers.0.mlp.down_proj": "rowwise"}, source="the plan"), declared=True
    )
    (note,) = resolve(plan, meta_model(intermediate_size=1000), 2).notes
    assert "replicates 1 of 2 model.layers.*: " in note
