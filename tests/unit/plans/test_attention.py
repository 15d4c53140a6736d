"""Heads of attention modules: what is split by them, and the counts of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import llama_config
from tests.unit.plans.test_plan import LAYER, MEGATRON, faults, meta_model
from tp_transformers.plans import Plan
from tp_transformers.plans.attention import AttentionHeads
from tp_transformers.plans.bind import resolve
from tp_transformers.plans.rule import Entry
from tp_transformers.slices.layout import Ranks, heads

ROLES: dict[str, Any] = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


class Attention(nn.Module):
    """Attention with a count of heads, and the config of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.num_heads = llama_config(8, 4), 8

    def forward(self) -> int:
        return self.num_heads


class ReadsConfig(Attention):
    """Attention that takes the count from its config."""

    def forward(self) -> int:
        return self.config.num_attention_heads


def of_two_ranks(**settings: Any) -> AttentionHeads:
    return AttentionHeads(*heads(8, 4, Ranks(2)), **settings)


@pytest.mark.parametrize(
    ("kind", "is_fused", "configured"), [(Attention, False, 8), (Attention, True, 4), (ReadsConfig, False, 4)]
)
def test_counts_are_set_where_a_module_has_them(kind, is_fused, configured) -> None:
    module, bare = kind(), nn.Module()
    config = module.config
    for each in (module, bare):
        of_two_ranks(is_fused=is_fused).count(each, "", 1)
    assert (module.num_heads, module.config.num_attention_heads, config.num_attention_heads) == (4, configured, 8)
    assert not hasattr(module, "n_head")
    assert not hasattr(bare, "config")


def test_attention_beside_what_a_plan_describes_is_not_recognised() -> None:
    plan = Plan.parse({"rules": MEGATRON, "attention": {"layers.0.self_attn": ROLES}}, source="mine")
    assert f"attention {LAYER}self_attn: the plan does not say where the heads of q_proj are" in faults(plan, size=3)
    of_another_section = replace(Plan.from_dict(MEGATRON), entries=(Entry("model.layers.*.mlp"),))
    assert len(resolve(of_another_section, meta_model(), 3).attention) == 2


def test_gates_and_scales_of_heads_are_split_as_their_queries() -> None:
    model = meta_model()
    for layer in model.model.layers:
        for name, width in (("gate", 8), ("wide", 64)):
            setattr(layer.self_attn, name, nn.Linear(64, width, bias=False, device="meta"))
        for name in ("scale", "shift"):
            setattr(layer.self_attn, name, nn.Parameter(torch.empty(8, device="meta")))
    expected = {"gate.weight": (4, 2, 2), "wide.weight": (32, 16, 16), "scale": (4, 2, 2), "shift": (4, 2, 2)}
    own = {"gate": "colwise", "wide": "colwise", "scale": "local_colwise", "shift": "local_colwise"}
    rules = {**MEGATRON, **{f"{LAYER}self_attn.{name}": strategy for name, strategy in own.items()}}
    declared = replace(Plan.from_dict(rules), declared=True)
    attention = {"layers.*.self_attn": {**ROLES, "with_query": list(own)}}
    for plan in (declared, Plan.parse({"rules": rules, "attention": attention}, source="mine")):
        layouts = resolve(plan, model, 3).layouts
        assert {name: layouts[f"model.layers.0.self_attn.{name}"].split.widths for name in expected} == expected
    model.model.layers[0].self_attn.gate = nn.Linear(64, 24, bias=False, device="meta")
    assert "the plan does not say where the heads of gate are" in faults(declared, model, 3)


def test_the_size_of_a_head_that_is_not_told_is_that_of_the_output() -> None:
    model = meta_model()
    model.config.head_dim = None
    for layer in model.model.layers:
        del layer.self_attn.head_dim
    assert resolve(Plan.from_dict(MEGATRON), model, 2).attention["model.layers.0.self_attn"].head_dim == 8
