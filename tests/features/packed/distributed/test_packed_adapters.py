"""LoRA on packed weights, against LoRA in one process on the weights that they stand for."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.comparisons import assert_same_tensors, gradient_differences, relative
from tests.support.models import MASK, PROMPTS, load, logits_of
from tests.support.tiers import wide
from tp_transformers.features.packed.weight import PackedWeight

TOLERANCE = 1e-5  # fp32 sums in another order


def adapters(model: Any) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if "lora_" in name}


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss
    return loss


def train(packed: str, plain: str, scratch: str, checkpoints: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    base = load(packed, dtype=torch.float32, tp_dequantize=False)
    targets = ["q_proj", "v_proj", "o_proj"]  # experts are parameters, which LoRA on a plan does not take
    if "llama" in type(base).__name__.lower():
        targets += ["up_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets)
    pair = []
    for model in (base, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)):
        torch.manual_seed(11)
        pair.append(get_peft_model(model, copy.deepcopy(config)).train())
        if checkpoints:
            pair[-1].gradient_checkpointing_enable({"use_reentrant": False})
            pair[-1].enable_input_require_grads()
    ours, theirs = pair
    whole = {}
    for index, (name, param) in enumerate(adapters(theirs).items()):
        whole[name] = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.3
    for each in pair:
        assert not each.load_state_dict(whole, strict=False).unexpected_keys
    decoded, count = PackedWeight.decoded, 0

    def counted(weight: PackedWeight) -> torch.Tensor:
        nonlocal count
        count += 1
        return decoded(weight)

    PackedWeight.decoded = counted  # type: ignore[method-assign]
    try:
        loss = loss_of(ours)
        in_forward = count
        loss.backward()
    finally:
        PackedWeight.decoded = decoded  # type: ignore[method-assign]
    loss_of(theirs).backward()
    grads = max(gradient_differences(ours, theirs).values())
    ours.eval(), theirs.eval()
    result = {
        "logits": relative(logits_of(ours), logits_of(theirs)),
        "gradients": grads,
        "again": count - in_forward,
        "footprint": base.get_memory_footprint(),
    }
    ours.save_pretrained(f"{scratch}/ours")
    if dist.get_rank() == 0:
        theirs.save_pretrained(f"{scratch}/theirs")
    dist.barrier()
    again = PeftModel.from_pretrained(load(packed, dtype=torch.float32, tp_dequantize=False), f"{scratch}/ours")
    result["again logits"] = relative(logits_of(again), logits_of(theirs))
    try:
        ours.merge_adapter()
    except tp_transformers.UnsupportedError as error:
        result["merged"] = str(error)
    return result


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
def test_adapters_on_packed_weights(pool, tmp_path, name, variant, size, checkpoints) -> None:
    packed, plain = packed_folder(tmp_path / "base", name, VARIANTS[variant])
    for rank in pool.run(size, train, str(packed), str(plain), str(tmp_path), checkpoints):
        assert rank["logits"] < TOLERANCE
        assert rank["gradients"] < TOLERANCE
        assert rank["again logits"] < TOLERANCE
        assert rank["again"] > 0, "a backward decodes, and keeps nothing decoded"
        assert "tp_dequantize=True" in rank["merged"]
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
