"""PEFT's LoRA on tensor-parallel models, once or twice; references are the same adapters in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import (
    BOFTConfig,
    CPTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tp_transformers
from tests.support.adapters import TOLERANCE, adapt, adapter_parameters, lora, shake, train
from tests.support.comparisons import assert_same_tensors, gradient_differences, relative
from tests.support.models import PROMPTS, load, load_both, logits_of
from tests.support.on_ranks import on_ranks, refused
from tests.support.tiers import wide


def train_all(folder: str, scratch: str | Path) -> None:
    """Run on every rank: adapters of linears, of embeddings and of the head."""
    train(folder, scratch, lora("all-linear"))
    train(folder, scratch, lora(["q_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"], lora_dropout=0.3))


@pytest.mark.parametrize(("heads", "size"), wide([((8, 2), 3), ((9, 3), 2), ((8, 4), 2)], 1))
@on_ranks(num_hidden_layers=1)
def test_lora_is_that_of_one_process(folder, tmp_path) -> None:
    train_all(folder, tmp_path)


@on_ranks()
def test_lora_on_fused_projections(fused, tmp_path) -> None:
    targets = ["c_attn", "c_proj", "c_fc"]
    train(fused, tmp_path, lora(targets, fan_in_fan_out=True, bias="all"))
    train(fused, tmp_path / "ia3", IA3Config(target_modules=targets, feedforward_modules=["c_proj"]))


@on_ranks(num_hidden_layers=1)
def test_other_ways_to_adapters(folder, tmp_path) -> None:
    scratch = str(tmp_path)
    targets = ["q_proj", "k_proj", "o_proj", "down_proj"]

    # transformers' own integration: an adapter made by one process, loaded by name, saved, and loaded with its base
    torch.manual_seed(1)
    alone = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_bias=False),
    ).eval()
    expected = logits_of(alone)
    model, plain = load_both(folder)
    rank = dist.get_rank()
    if rank == 0:
        alone.save_pretrained(f"{scratch}/adapter")
    dist.barrier()
    model.load_adapter(f"{scratch}/adapter")
    assert relative(logits_of(model), expected) < TOLERANCE
    assert not any(param.requires_grad for param in adapter_parameters(model).values())
    q_proj = model.model.layers[0].self_attn.q_proj
    assert q_proj.lora_B["default"].weight.tp_shard.local_shape != q_proj.lora_B["default"].weight.tp_shard.shape
    model.save_pretrained(f"{scratch}/saved")
    dist.barrier()
    assert_same_tensors(f"{scratch}/adapter", f"{scratch}/saved")
    together = load(f"{scratch}/saved")
    assert relative(logits_of(together), expected) < TOLERANCE
    with pytest.raises(ValueError, match=r"PEFT you are using|No adapter") as refusal:
        plain.disable_adapters()
    if "No adapter" in str(refusal.value):  # else transformers refuses the installed release of PEFT
        model.disable_adapters()
        assert relative(logits_of(model), logits_of(plain)) < TOLERANCE

    # a second adapter, a copy, a state dict
    model = get_peft_model(load(folder), LoraConfig(r=4, target_modules=["v_proj"]))
    model.load_adapter(f"{scratch}/adapter", adapter_name="second")
    model.set_adapter("second")
    assert relative(logits_of(copy.deepcopy(model).eval()), expected) < TOLERANCE
    for param in adapter_parameters(model).values():
        tp_transformers.local_tensor(param).zero_()
    model.load_state_dict(
        {name.replace("default", "second"): value for name, value in alone.state_dict().items()}, strict=False
    )
    assert relative(logits_of(model.eval()), expected) < TOLERANCE

    # bf16, whose adapters peft keeps in fp32
    half, whole = load_both(folder, dtype=torch.bfloat16)
    half, whole = (PeftModel.from_pretrained(each, f"{scratch}/adapter") for each in (half, whole))
    for (name, mine), param in zip(half.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(tp_transformers.full_tensor(mine), param), name
        assert mine.dtype == param.dtype, name
    # bf16 sums in another order differ by a few of its steps of 2**-8
    assert relative(logits_of(half), logits_of(whole)) < 0.1

    # a head that is trained and saved whole beside the adapters
    torch.manual_seed(2)
    ours, theirs = load_both(folder, AutoModelForSequenceClassification, num_labels=3)
    theirs.score.weight.data.copy_(tp_transformers.full_tensor(ours.score.weight))
    ours, theirs = adapt((ours, theirs), LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS"), seed=2)
    shake(ours, theirs)
    assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE
    ours.save_pretrained(f"{scratch}/classifier")
    dist.barrier()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    alone = PeftModel.from_pretrained(plain, f"{scratch}/classifier")
    assert relative(logits_of(alone), logits_of(theirs)) < TOLERANCE

    # what is refused, before anything is changed
    model = load(folder)
    names = [name for name, _ in model.named_parameters()]
    for config, message in (
        (LoraConfig(target_modules=["embed_tokens"], use_dora=True), "DoRA on a .*: got the embedding"),
        (LoraConfig(target_modules=["lm_head"], use_dora=True), "DoRA on a .* got lm_head, which has the strategy"),
        (LoraConfig(target_modules=targets, init_lora_weights="eva"), "got init_lora_weights='eva'"),
        (
            LoHaConfig(target_modules=targets, rank_dropout=0.1),
            "LoHaConfig on a tensor-parallel model: got rank_dropout",
        ),
        (IA3Config(target_modules=["lm_head"], feedforward_modules=[]), "IA3 .*lm_head, which has the strategy"),
        (
            OFTConfig(target_modules=["o_proj"], oft_block_size=9),
            "OFT on .*o_proj: got blocks of 9 inputs, .* that divides 24",
        ),
        (OFTConfig(target_modules="all-linear", oft_block_size=9), "OFT on .*: got blocks of 9 inputs"),
        (OFTConfig(target_modules=["o_proj"], r=8, oft_block_size=0), "OFT on .*o_proj: got blocks of 9 inputs"),
        (OFTConfig(target_modules=["q_proj"], oft_block_size=8, coft=True), "OFTConfig .* got coft"),
        (BOFTConfig(target_modules=["k_proj"], boft_block_size=4), "adapters of the type BOFT"),
        (CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1], cpt_mask=[1], cpt_tokens_type_mask=[1]), "type CPT"),
    ):
        with pytest.raises(tp_transformers.UnsupportedError, match=message):
            get_peft_model(model, config)
    torch.manual_seed(rank)
    with pytest.raises(tp_transformers.MeshError, match="lora_dropout: got another random state on each rank"):
        get_peft_model(model, LoraConfig(target_modules=targets, lora_dropout=0.1))
    assert [name for name, _ in model.named_parameters()] == names


@on_ranks()
def test_a_full_disk_is_told_with_the_folder(folder, tmp_path) -> None:
    target = tmp_path / "adapter"
    adapted = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"]))
    full = mock.patch("peft.peft_model.safe_save_file", side_effect=OSError(28, "No space left on device"))
    says = f"folder {target}: got [Errno 28] No space left on device, expected that"
    with full, refused(tp_transformers.CheckpointError, says):
        adapted.save_pretrained(target)
    assert not any(target.rglob("*"))


LORA = LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["q_proj", "o_proj"])
SECOND = {
    "lora": LORA,
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", SECOND)
@on_ranks()
def test_adapters_of_two_calls_are_those_of_one_process(folder, kind) -> None:
    models = []
    for model in load_both(folder):
        torch.manual_seed(7)
        for name, config in (("first", LORA), ("second", SECOND[kind])):
            model = get_peft_model(model, config, adapter_name=name)
        models.append(model)
    for adapter in ("first", "second") if kind != "prompts" else ("second",):  # prompts keep PEFT from the inner model
        for model in models:
            model.set_adapter(adapter)
        with torch.no_grad():  # B begins with zeros
            for name, _ in models[0].named_parameters():
                if "lora_B" in name:
                    for model in models:
                        model.get_parameter(name).normal_(generator=torch.Generator().manual_seed(len(name)))
        logits = [model(input_ids=PROMPTS).logits for model in models]
        assert relative(*(output.detach() for output in logits)) < TOLERANCE, adapter
    for output in logits:
        output.pow(2).mean().backward()
    assert max(gradient_differences(*models).values()) < TOLERANCE
