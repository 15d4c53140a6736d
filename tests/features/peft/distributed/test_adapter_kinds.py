"""Other kinds of PEFT's adapters than LoRA on linears; references are the same adapters in one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GptOssConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import tp_transformers
from tests.support.adapters import TOLERANCE, adapt, lora, save_both, shake, step, train, trainable
from tests.support.comparisons import assert_same_tensors, gradient_differences, parameter_differences, relative
from tests.support.models import MASK, PROMPTS, VOCAB, load_both, logits_of
from tests.support.on_ranks import on_ranks
from tests.support.tiers import wide
from tests.support.training import mesh_of

KINDS = {
    "IA3": IA3Config(target_modules=["q_proj", "k_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "IA3 on inputs": IA3Config(target_modules=["v_proj", "up_proj"], feedforward_modules=["v_proj", "up_proj"]),
    "LoHa": LoHaConfig(r=2, target_modules="all-linear", init_weights=False),
    "LoKr": LoKrConfig(r=2, target_modules="all-linear", init_weights=False),
    "LoKr of two matrices": LoKrConfig(r=2, target_modules=["q_proj", "down_proj"], decompose_both=True),
    "AdaLoRA": AdaLoraConfig(init_r=3, target_r=2, lora_alpha=5, target_modules="all-linear", total_step=9),
    "AdaLoRA with dropout": AdaLoraConfig(
        init_r=3, target_modules=["q_proj", "down_proj"], total_step=9, lora_dropout=0.3
    ),
    "OFT": OFTConfig(oft_block_size=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "lm_head"]),
    "OFT with shared blocks": OFTConfig(oft_block_size=8, target_modules=["q_proj", "o_proj"], block_share=True),
    "OFT, exactly": OFTConfig(oft_block_size=8, target_modules=["v_proj", "o_proj"], use_cayley_neumann=False),
    "VeRA": VeraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "VeRA with dropout": VeraConfig(r=4, target_modules=["q_proj", "o_proj"], vera_dropout=0.3),
    "LN tuning": LNTuningConfig(),
    "PiSSA": lora("all-linear", init_lora_weights="pissa"),
    "PiSSA in few steps": lora(["k_proj", "o_proj"], init_lora_weights="pissa_niter_4"),
    "OLoRA": lora(["v_proj", "down_proj", "lm_head"], init_lora_weights="olora"),
    "DoRA": lora(["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"], use_dora=True),
    "DoRA with dropout": lora(["q_proj", "o_proj"], use_dora=True, lora_dropout=0.3),
    "modules to save": lora(["q_proj"], modules_to_save=["lm_head", "embed_tokens", "down_proj"]),
    "tokens": lora(["q_proj"], trainable_token_indices={"embed_tokens": [1, 5, VOCAB - 1], "lm_head": [17]}),
    "rsLoRA": lora(["q_proj", "down_proj"], use_rslora=True),
}


QUICK = ("AdaLoRA", "PiSSA", "DoRA", "modules to save", "tokens")
"""IA3, LoHa and OFT are quick in test_adapter_plans.py."""


@pytest.mark.slow
@on_ranks()
def test_kinds_with_shards_of_the_sequence(folder, tmp_path) -> None:
    for kind, config in KINDS.items():
        train(folder, tmp_path / kind, config, tp_sequence_parallel=True)


@pytest.mark.slow
@on_ranks(tie_word_embeddings=True)
def test_trainable_tokens_of_tied_weights(folder, tmp_path) -> None:
    train(folder, tmp_path, lora(["q_proj"], trainable_token_indices=[2, VOCAB - 1]))


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((9, 3), 3), ((8, 4), 2)], 1))
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@on_ranks(num_hidden_layers=1)
def test_other_kinds_are_those_of_one_process(folder, tmp_path, kind) -> None:
    train(folder, tmp_path, KINDS[kind])


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((9, 3), 3), ((8, 2), 4)], 1))
@on_ranks()
def test_adalora_allocates_as_one_process(folder, tmp_path) -> None:
    """AdaLoRA takes ranks from some matrices and leaves them to others."""
    config = AdaLoraConfig(
        init_r=4, target_r=2, target_modules="all-linear", task_type="CAUSAL_LM", total_step=8, tinit=1, tfinal=2
    )
    ours, theirs = adapt(load_both(folder), config)
    for model in (ours.train(), theirs.train()):
        optimizer = torch.optim.SGD(trainable(model), lr=0.5)
        for index in range(8):
            step(model, optimizer)
            optimizer.step()
            model.base_model.update_and_allocate(index)
    patterns = [dict(model.peft_config["default"].rank_pattern) for model in (ours, theirs)]
    assert patterns[0] == patterns[1]
    assert len({sum(kept) for kept in patterns[0].values()}) > 1
    assert max(parameter_differences(ours, theirs).values()) < TOLERANCE
    expected = logits_of(ours.eval())
    assert relative(expected, logits_of(theirs.eval())) < TOLERANCE
    save_both(ours, theirs, tmp_path)
    for model, saved in zip(load_both(folder), ("theirs", "ours"), strict=True):
        again = PeftModel.from_pretrained(model, tmp_path / saved)
        assert relative(logits_of(again.eval()), expected) < TOLERANCE
    assert relative(logits_of(ours.merge_and_unload()), expected) < TOLERANCE


EXPERTS = {
    "Mixtral": MixtralConfig(num_local_experts=5, num_experts_per_tok=2),
    "GPT-OSS": GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1, head_dim=8, initializer_range=0.2
    ),
}


WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def save_experts(kind: str, folder: Path) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 3}
    config = copy.deepcopy(EXPERTS[kind])
    config.update({**sizes, "num_hidden_layers": 1, "vocab_size": VOCAB})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("size", wide([2, 3], 1))
@pytest.mark.parametrize("plan", wide(["experts", "auto"], 1))
@pytest.mark.parametrize("kind", EXPERTS)
@on_ranks()
def test_lora_on_experts_is_that_of_one_process(experts, tmp_path) -> None:
    folder, plan = experts
    train(folder, tmp_path, lora(["q_proj", "o_proj"], target_parameters=WEIGHTS), tp_plan=plan)


@pytest.fixture
def experts(tmp_path: Path, kind: str, plan: str) -> tuple[str, str]:
    """A mixture of experts, and a plan that leaves experts complete, or the usual one."""
    save_experts(kind, tmp_path / "model")
    weights = ("gate_up_proj", "down_proj", *("gate_up_proj_bias", "down_proj_bias") * (kind == "GPT-OSS"))
    rules = {f"layers.*.mlp.experts.{name}": "local" for name in weights}
    model_type = EXPERTS[kind].model_type
    complete = {"model_type": model_type, "extends": model_type, "base_model": rules}
    path = tmp_path / "experts.yaml"
    path.write_text(yaml.safe_dump(complete))
    return str(tmp_path / "model"), "auto" if plan == "auto" else str(path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicate", "shard"])
@pytest.mark.parametrize(
    "kind",
    [
        *("IA3", "LoHa", "LoKr", "VeRA", "LN tuning", "PiSSA", "AdaLoRA", "OFT", "DoRA"),
        *("modules to save", "tokens", "experts"),
    ],
)
@on_ranks(4)
def test_kinds_in_copies(folder, mixtral, kind, mode) -> None:
    """Gradients of two copies of two ranks against one process with the whole batch."""
    mesh = mesh_of(2)
    config = lora(["q_proj"], target_parameters=WEIGHTS) if kind == "experts" else KINDS[kind]
    ours, theirs = adapt(load_both(mixtral if kind == "experts" else folder, device_mesh=mesh), config)
    shake(ours, theirs)
    tp_transformers.data_parallel(ours, mesh, mode=mode)
    batch = PROMPTS.new_tensor([[1, 5, 17, 3, 9], [VOCAB - 1, 2, 5, 5, 8]])
    ours(batch[mesh["dp"].get_local_rank()][None], labels=batch[mesh["dp"].get_local_rank()][None]).loss.backward()
    theirs(batch, labels=batch).loss.backward()
    params = dict(ours.named_parameters())
    for name, param in theirs.named_parameters():
        if param.grad is not None:
            error = relative(tp_transformers.full_tensor(params[name], params[name].grad), param.grad)
            assert error < TOLERANCE, f"{name}: {error}"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixtral")
    save_experts("Mixtral", folder)
    return str(folder)


OF_T5 = {
    "LoRA": LoraConfig(r=3, target_modules=["q", "k", "v", "o", "wi", "wo", "shared"]),
    "DoRA": LoraConfig(r=3, target_modules=["q", "k", "v", "o", "wi", "wo"], use_dora=True),
    "PiSSA": LoraConfig(r=2, target_modules=["q", "v", "wo"], init_lora_weights="pissa"),
    "IA3": IA3Config(target_modules=["k", "v", "wo"], feedforward_modules=["wo"]),
    "LoHa": LoHaConfig(r=2, target_modules=["q", "o", "wi", "wo"], init_weights=False),
    "AdaLoRA": AdaLoraConfig(init_r=3, target_modules=["q", "o", "wi", "wo"], total_step=9),
    "OFT": OFTConfig(oft_block_size=4, target_modules=["q", "o"]),
}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder and a decoder of one layer."""
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 3, "vocab_size": VOCAB}
    torch.manual_seed(0)
    config = T5Config(**sizes, dropout_rate=0.0, initializer_factor=1.0, decoder_start_token_id=0)
    folder = tmp_path_factory.mktemp("t5")
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", OF_T5)
@on_ranks()
def test_adapters_of_t5(t5, tmp_path, kind) -> None:
    adapted = adapt(load_both(t5, AutoModelForSeq2SeqLM), OF_T5[kind])
    shake(*adapted)
    for model in adapted:
        model(PROMPTS, attention_mask=MASK, labels=PROMPTS[:, :4].contiguous()).loss.backward()
    errors = gradient_differences(*adapted)
    assert max(errors.values()) < TOLERANCE, errors
    save_both(*adapted, tmp_path)
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
    merged = [model.merge_and_unload() for model in adapted]
    assert max(parameter_differences(*merged).values()) < TOLERANCE


PROMPT_KINDS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=16),
}


@pytest.mark.parametrize(("heads", "size"), wide([((9, 3), 2), ((8, 4), 3)], 1))
@pytest.mark.parametrize("kind", PROMPT_KINDS)
@on_ranks(num_hidden_layers=1)
def test_prompts_are_those_of_one_process(folder, tmp_path, kind) -> None:
    adapted = adapt(load_both(folder), PROMPT_KINDS[kind])
    ours, theirs = adapted
    optimizers = [torch.optim.AdamW(trainable(model), lr=1e-2) for model in adapted]
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
    ours.save_pretrained(tmp_path / "ours")
    dist.barrier()
    for base in load_both(folder):
        assert relative(logits_of(PeftModel.from_pretrained(base, tmp_path / "ours")), expected) < 1e-3
