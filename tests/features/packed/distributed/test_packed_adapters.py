"""LoRA on packed weights, against LoRA in one process on the weights that they stand for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.adapters import adapt, save_both, shake
from tests.support.comparisons import assert_same_tensors, gradient_differences, relative
from tests.support.models import MASK, PROMPTS, load, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tp_transformers.features.packed.weight import PackedWeight

TOLERANCE = 1e-5  # fp32 sums in another order


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss
    return loss


@pytest.mark.parametrize(
    ("name", "variant", "size", "checkpoints"),
    wide(
        [
            ("llama", "int4 with zero points", 3, False),
            ("llama", "gptq", 2, True),
            ("llama", "gptq in order", 3, False),
            ("llama", "awq", 2, False),
            ("qwen3_moe", "int8 by rows", 2, False),
        ],
        1,
    ),
)
@on_ranks()
def test_adapters_on_packed_weights(folders, tmp_path, checkpoints) -> None:
    packed, plain = folders
    base = load(packed, dtype=torch.float32, tp_dequantize=False)
    targets = ["q_proj", "v_proj", "o_proj"]  # experts are parameters, which LoRA on a plan does not take
    if "llama" in type(base).__name__.lower():
        targets += ["up_proj", "down_proj"]
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    pair = adapt((base, whole), LoraConfig(r=3, lora_alpha=5, target_modules=targets))
    for model in pair:
        model.train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
    ours, theirs = pair
    shake(ours, theirs)
    with mock.patch.object(PackedWeight, "decoded", autospec=True, side_effect=PackedWeight.decoded) as decoded:
        loss = loss_of(ours)
        in_forward = decoded.call_count
        loss.backward()
    assert decoded.call_count > in_forward, "a backward decodes, and keeps nothing decoded"
    loss_of(theirs).backward()
    assert max(gradient_differences(ours, theirs).values()) < TOLERANCE
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < TOLERANCE
    save_both(ours, theirs, tmp_path)
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
    again = PeftModel.from_pretrained(load(packed, dtype=torch.float32, tp_dequantize=False), tmp_path / "ours")
    assert relative(logits_of(again), expected) < TOLERANCE
    with pytest.raises(tp_transformers.UnsupportedError, match="tp_dequantize=True"):
        ours.merge_adapter()


@pytest.fixture
def folders(tmp_path, name, variant):
    """A quantised checkpoint, and one of the same values in floating point."""
    return packed_folder(tmp_path / "base", name, VARIANTS[variant])
