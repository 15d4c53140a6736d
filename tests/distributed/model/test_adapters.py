"""PEFT's LoRA on tensor-parallel models; references are the same adapters in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    MixtralConfig,
)

import tp_transformers
from tests.support.comparisons import (
    assert_same_tensors,
    gradient_differences,
    parameter_differences,
    relative,
)
from tests.support.models import MASK, PROMPTS, VOCAB, load, load_both, logits_of
from tests.support.tiers import wide

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-4  # fp32 sums in another order


def adapter_parameters(model: Any) -> dict[str, Any]:
    return {
        name: param
        for name, param in model.named_parameters()
        if any(kind in name for kind in ("lora_", "hada_", "ia3_", "ln_tuning_"))
    }


def shake(ours: Any, theirs: Any) -> None:
    """Give both the same adapters of random values: those that are made add nothing."""
    mine = adapter_parameters(ours)
    whole = {}
    for index, (name, param) in enumerate(adapter_parameters(theirs).items()):
        error = relative(tp_transformers.full_tensor(mine[name]), param)
        assert error < TOLERANCE, f"{name}: initialised unlike one process"  # an SVD depends on the weight's alignment
        whole[name] = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.3
    for each in (ours, theirs):
        result = each.load_state_dict(whole, strict=False)
        assert not result.unexpected_keys


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    torch.manual_seed(3)  # of what dropout drops
    model(PROMPTS, attention_mask=MASK, labels=PROMPTS).loss.backward()


def lora(targets: Any, **options: Any) -> LoraConfig:
    return LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **options)


def train(folder: str, scratch: str, config: Any, **options: Any) -> None:
    models = load(folder, **options), AutoModelForCausalLM.from_pretrained(folder)
    adapted = []
    for model in models:
        torch.manual_seed(11)
        adapted.append(get_peft_model(model, copy.deepcopy(config)).train())
    ours, theirs = adapted
    shake(ours, theirs)
    rank, scratch = dist.get_rank(), f"{scratch}/{len(adapter_parameters(theirs))}"
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < TOLERANCE
    with ours.disable_adapter(), theirs.disable_adapter():
        assert relative(logits_of(ours), logits_of(theirs)) < TOLERANCE

    # gradients, and a few steps
    ours.train(), theirs.train()
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in adapted]
    for _ in range(2):
        for model, optimizer in zip(adapted, optimizers, strict=True):
            step(model, optimizer)
        mine = dict(ours.named_parameters())
        for name, param in theirs.named_parameters():
            assert mine[name].requires_grad == param.requires_grad, name
        errors = gradient_differences(ours, theirs)
        assert errors.keys() == {name for name, param in mine.items() if param.requires_grad}
        assert max(errors.values()) < TOLERANCE, errors
        for optimizer in optimizers:
            optimizer.step()
    for name, param in adapter_parameters(theirs).items():
        # AdamW divides by the root of squares: what is small differs more
        assert relative(tp_transformers.full_tensor(mine[name]), param) < 1e-2, name
    trained = {name: tp_transformers.full_tensor(param) for name, param in mine.items() if param.requires_grad}
    theirs.load_state_dict(trained, strict=False)

    # files
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    ours.save_pretrained(f"{scratch}/ours")
    if rank == 0:
        theirs.save_pretrained(f"{scratch}/theirs")
    dist.barrier()
    assert_same_tensors(f"{scratch}/theirs", f"{scratch}/ours")
    files = [sorted(path.name for path in Path(scratch, who).iterdir()) for who in ("ours", "theirs")]
    assert files[0] == files[1]
    torch.manual_seed(11)  # a randomised SVD subtracts the same from the weights again
    again = PeftModel.from_pretrained(load(folder, **options), f"{scratch}/ours")
    assert relative(logits_of(again), expected) < TOLERANCE
    torch.manual_seed(11)
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), f"{scratch}/ours")
    assert relative(logits_of(alone), expected) < TOLERANCE
    trainable = [[name for name, param in each.named_parameters() if param.requires_grad] for each in (again, alone)]
    assert trainable[0] == trainable[1]

    # merged, and taken apart
    for safe in (False, True):
        ours.merge_adapter(safe_merge=safe), theirs.merge_adapter(safe_merge=safe)
        assert relative(logits_of(ours), expected) < TOLERANCE
        errors = parameter_differences(*(model.get_base_model() for model in (ours, theirs)))
        assert max(errors.values()) < TOLERANCE, errors
        ours.unmerge_adapter(), theirs.unmerge_adapter()
        assert relative(logits_of(ours), expected) < TOLERANCE
    merged = ours.merge_and_unload()
    assert tp_transformers.is_tensor_parallel(merged)
    assert not adapter_parameters(merged)
    merged.save_pretrained(f"{scratch}/merged")
    dist.barrier()
    assert relative(logits_of(AutoModelForCausalLM.from_pretrained(f"{scratch}/merged")), expected) < TOLERANCE


def train_all(folder: str, scratch: str) -> None:
    warnings.simplefilter("ignore")
    train(folder, scratch, lora("all-linear"))
    train(folder, scratch, lora(["q_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"], lora_dropout=0.3))


@pytest.mark.parametrize(("heads", "size"), wide([((8, 2), 3), ((9, 3), 2), ((8, 4), 2)], 1))
def test_lora_is_that_of_one_process(pool: Any, cases: Any, tmp_path: Path, heads: tuple[int, int], size: int) -> None:
    pool.run(size, train_all, cases(*heads).folder, str(tmp_path))


KINDS = {
    "IA3": IA3Config(target_modules=["q_proj", "k_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "IA3 on inputs": IA3Config(target_modules=["v_proj", "up_proj"], feedforward_modules=["v_proj", "up_proj"]),
    "LoHa": LoHaConfig(r=2, target_modules="all-linear", init_weights=False),
    "LN tuning": LNTuningConfig(),
    "PiSSA": lora("all-linear", init_lora_weights="pissa"),
    "PiSSA in few steps": lora(["k_proj", "o_proj"], init_lora_weights="pissa_niter_4"),
    "OLoRA": lora(["v_proj", "down_proj", "lm_head"], init_lora_weights="olora"),
    "DoRA": lora(["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"], use_dora=True),
    "DoRA with dropout": lora(["q_proj", "o_proj"], use_dora=True, lora_dropout=0.3),
    "rsLoRA": lora(["q_proj", "down_proj"], use_rslora=True),
}


def train_kind(folder: str, scratch: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    config = copy.deepcopy(KINDS[kind])
    config.task_type = "CAUSAL_LM"
    train(folder, scratch, config)


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((9, 3), 3), ((8, 4), 2)], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_those_of_one_process(
    pool: Any, cases: Any, tmp_path: Path, kind: str, heads: tuple[int, int], size: int
) -> None:
    pool.run(size, train_kind, cases(*heads).folder, str(tmp_path), kind)


EXPERTS = {
    "Mixtral": MixtralConfig(num_local_experts=5, num_experts_per_tok=2),
    "GPT-OSS": GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1, head_dim=8, initializer_range=0.2
    ),
}


def train_experts(folder: str, scratch: str, plan: Any) -> None:
    warnings.simplefilter("ignore")
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    train(folder, scratch, lora(["q_proj", "o_proj"], target_parameters=weights), tp_plan=plan)


@pytest.mark.parametrize("size", wide([2, 3], 1))
@pytest.mark.parametrize("plan", ["auto", "experts"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_lora_on_experts_is_that_of_one_process(pool: Any, tmp_path: Path, kind: str, plan: str, size: int) -> None:
    config = EXPERTS[kind]
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 3}
    config.update({**sizes, "num_hidden_layers": 1, "vocab_size": VOCAB})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    weights = ("gate_up_proj", "down_proj", *("gate_up_proj_bias", "down_proj_bias") * (kind == "GPT-OSS"))
    rules = {f"layers.*.mlp.experts.{name}": "local" for name in weights}
    complete = {"model_type": config.model_type, "extends": config.model_type, "base_model": rules}
    path = tmp_path / "experts.yaml"
    path.write_text(yaml.safe_dump(complete))
    pool.run(size, train_experts, str(tmp_path / "model"), str(tmp_path), "auto" if plan == "auto" else str(path))


PROMPT_KINDS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=16),
}


def train_prompts(folder: str, scratch: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    config, adapted = PROMPT_KINDS[kind], []
    for model in load_both(folder):
        torch.manual_seed(11)
        adapted.append(get_peft_model(model, copy.deepcopy(config)))
    ours, theirs = adapted
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in adapted]
    for _ in range(3):
        for model, optimizer in zip(adapted, optimizers, strict=True):
            step(model.train(), optimizer)
        errors = gradient_differences(ours, theirs)
        assert max(errors.values()) < TOLERANCE, errors
        for optimizer in optimizers:
            optimizer.step()
    ours.eval(), theirs.eval()
    expected = logits_of(theirs)
    assert relative(logits_of(ours), expected) < 1e-3
    assert torch.equal(*(each.generate(input_ids=PROMPTS, attention_mask=MASK, max_new_tokens=4) for each in adapted))
    ours.save_pretrained(f"{scratch}/ours")
    dist.barrier()
    for base in (load(folder), AutoModelForCausalLM.from_pretrained(folder)):
        assert relative(logits_of(PeftModel.from_pretrained(base, f"{scratch}/ours")), expected) < 1e-3


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((8, 4), 3)], 1))
@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_prompts_are_those_of_one_process(
    pool: Any, cases: Any, tmp_path: Path, kind: str, heads: tuple[int, int], size: int
) -> None:
    pool.run(size, train_prompts, cases(*heads).folder, str(tmp_path), kind)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fused projections, stored transposed, of three heads."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 32, "n_inner": 50, "vocab_size": VOCAB}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**sizes, **drops, initializer_range=0.2)).save_pretrained(folder)
    return str(folder)


def train_fused(folder: str, scratch: str) -> None:
    warnings.simplefilter("ignore")
    train(folder, scratch, lora(["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, bias="all"))
    targets = ["c_attn", "c_proj", "c_fc"]
    train(
        folder,
        f"{scratch}/ia3",
        IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=["c_proj"]),
    )


def test_lora_on_fused_projections(pool: Any, gpt2: str, tmp_path: Path) -> None:
    pool.run(2, train_fused, gpt2, str(tmp_path))


def other_ways(folder: str, scratch: str) -> None:
    warnings.simplefilter("ignore")
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
    adapted = []
    for each in (ours, theirs):
        torch.manual_seed(2)
        adapted.append(get_peft_model(each, LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS")))
    ours, theirs = adapted
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
        (VeraConfig(target_modules=["k_proj"]), "adapters of the type VERA"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "adapters of the type PREFIX_TUNING"),
    ):
        with pytest.raises(tp_transformers.UnsupportedError, match=message):
            get_peft_model(model, config)
    torch.manual_seed(rank)
    with pytest.raises(tp_transformers.MeshError, match="lora_dropout: got another random state on each rank"):
        get_peft_model(model, LoraConfig(target_modules=targets, lora_dropout=0.1))
    assert [name for name, _ in model.named_parameters()] == names


def test_other_ways_to_adapters(pool: Any, cases: Any, tmp_path: Path) -> None:
    pool.run(2, other_ways, cases(9, 3).folder, str(tmp_path))


def save_to_full_disk(folder: str, target: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    adapted = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"]))
    with mock.patch("peft.peft_model.safe_save_file", fail):
        adapted.save_pretrained(target)


def test_a_full_disk_is_told_with_the_folder(pool: Any, cases: Any, tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    said = pool.error(2, save_to_full_disk, cases(9, 3).folder, str(target))
    assert f"folder {target}: got [Errno 28] No space left on device, expected that" in said
    assert not any(target.rglob("*"))
