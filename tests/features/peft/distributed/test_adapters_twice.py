"""A PeftModel around a PeftModel: adapters by two calls, of one type or of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

from tests.support.comparisons import gradient_differences, relative
from tests.support.models import PROMPTS, load_both
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

LORA = LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["q_proj", "o_proj"])
SECOND = {
    "lora": LORA,
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def differences(folder: str, kind: str) -> dict[str, float]:
    """Run on every rank: how far logits of both adapters, and the worst gradient, are from one process."""
    models = []
    for model in load_both(folder):
        torch.manual_seed(7)
        for name, config in (("first", LORA), ("second", SECOND[kind])):
            model = get_peft_model(model, config, adapter_name=name)
        models.append(model)
    found = {}
    for adapter in ("first", "second") if kind != "prompts" else ("second",):  # prompts keep PEFT from the inner model
        for model in models:
            model.set_adapter(adapter)
        with torch.no_grad():  # B begins with zeros
            for name, _ in models[0].named_parameters():
                if "lora_B" in name:
                    for model in models:
                        model.get_parameter(name).normal_(generator=torch.Generator().manual_seed(len(name)))
        logits = [model(input_ids=PROMPTS).logits for model in models]
        found[adapter] = relative(*(output.detach() for output in logits))
    for output in logits:
        output.pow(2).mean().backward()
    found["gradients"] = max(gradient_differences(*models).values())
    return found


@pytest.mark.parametrize("kind", SECOND)
def test_adapters_of_two_calls_are_those_of_one_process(pool: Pool, cases: Any, kind: str) -> None:
    for found in pool.run(2, differences, cases(9, 3).folder, kind):
        assert max(found.values()) < 1e-4, found  # fp32 sums in another order
