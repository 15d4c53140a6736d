"""Every plan of `model_plans/` on the meta device: it covers every parameter of every class of its architecture."""

from __future__ import annotations

from dataclasses import replace
from itertools import filterfalse
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.architectures import ARCHITECTURES
from tests.support.needs import needs
from tp_transformers.plans import Plan
from tp_transformers.plans.bind import resolve

AUTO = {
    "base": modeling_auto.MODEL_MAPPING,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "question": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "generation": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}


def models(name: str) -> list[PreTrainedModel]:
    """One meta-device model of every class that the architecture has."""
    architecture = ARCHITECTURES[name]
    heads, kv_heads = architecture.variants[0]
    config = getattr(transformers, architecture.config)(**architecture.settings(heads, kv_heads, False))
    config.num_labels = 3
    classes: dict[Any, None] = {getattr(transformers, architecture.model): None}
    for mapping in AUTO.values():
        if type(config) in mapping.keys():  # noqa: SIM118 - a lazy mapping, whose `in` says no more than this
            found = mapping[type(config)]
            classes |= dict.fromkeys(found if isinstance(found, tuple) else (found,))
    with torch.device("meta"):
        return [cls._from_config(config) for cls in classes]


@needs("architectures")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_plan_covers_every_parameter_of_every_class_at_any_size(name) -> None:
    for model in models(name):
        plan = Plan.for_model(model)
        assert not plan.declared
        for size in (1, 2, 3, 5, 8):
            resolution = resolve(plan, model, size)
            assert not list(filterfalse(plan.inner_model_around, resolution.uncovered)), type(model).__name__
            assert resolution.notes == () or size > 4  # no attention is replicated; towers have 4 heads
        for size in (2, 3):  # every layer is sharded, or there is a note
            assert resolve(replace(plan, declared=True), model, size).notes == ()
    for size in (2, 16):  # more ranks than heads
        resolve(plan, model, size)
