"""The plan of the layers that draft tokens, from the plan of the model that they draft for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ...anatomy import base_prefix
from ...plans.attention import Attention
from ...plans.rule import Entry, Rule
from ...plans.rules import Plan

P = TypeVar("P", Rule, Attention, Entry)

PROJECTION = (
    Rule("layers.*.eh_proj", "colwise_rep"),
    *(Rule(f"layers.*.{norm}", "replicate", optional=True) for norm in ("enorm", "hnorm", "post_norm")),
    Rule("shared_post_norm", "replicate", optional=True),
)
"""Rules of what is around the block of a layer: the projection of an embedding and a hidden state, and norms."""


def drafting_plan(model: PreTrainedModel, plan: Plan) -> Plan:
    """Rules of `plan`, of `model`, for the layers of transformers' MtpModel, whose blocks are the model's layers."""
    return replace(
        plan,
        source=f"{plan.source}, for the layers of multi-token prediction",
        rules=(*PROJECTION, *_in_blocks(plan.rules, model)),
        attention=_in_blocks(plan.attention, model),
        entries=_in_blocks(plan.entries, model),
        model_types=(),
        inner_models=(),
        notes=(),
    )


def _in_blocks(entries: Iterable[P], model: Any) -> tuple[P, ...]:
    """The entries of layers, by the names of blocks; of two with one name, that of the later layer."""
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    layer = re.compile(rf"{re.escape(decoder)}\.layers\.(\*|\d+)(?=\.|$)")
    found: dict[str, P] = {}
    for entry in entries:
        name, count = layer.subn("layers.*.mtp_block", entry.full(base_prefix(model)))
        if count:
            found[name] = replace(entry, pattern=name, in_base_model=False, optional=True)
    return tuple(found.values())
