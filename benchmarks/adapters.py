"""One rank of `bench_adapters`: `python -m benchmarks.adapters JOB` trains every method on one model, and compares."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    T5Config,
)

import tp_transformers
from tp_transformers.features.verify.differences import relative

from . import rank

VOCAB, SAMPLES, LENGTH, STEPS = 211, 4, 12, 20
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "initializer_range": 0.1,
}
_T5 = {"d_model": 72, "d_kv": 8, "d_ff": 88, "num_layers": 2, "num_heads": 9, "dropout_rate": 0.0, "pad_token_id": 0}
MODELS: dict[str, Any] = {
    "Llama": LlamaConfig(**_TEXT),
    "Mixtral": MixtralConfig(**_TEXT, num_local_experts=5, num_experts_per_tok=2),
    "GPT-OSS": GptOssConfig(**_TEXT, num_local_experts=5, num_experts_per_tok=2),
    "T5": T5Config(**_T5, vocab_size=VOCAB, decoder_start_token_id=0),
}
"""All with 9 query heads, those but T5 with 3 KV heads; experts do not divide by the ranks."""
_LINEARS = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "T5": ["q", "k", "v", "o", "wi", "wo"],
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Job:
    """The job of one rank: one model, and the methods."""

    folder: str
    model: str
    methods: list[str]
    size: int
    rank: int
    store: str
    """A file by which the ranks meet."""
    result: str = ""


def _lora(linears: list[str], task: str, **options: Any) -> Any:
    return peft.LoraConfig(r=3, lora_alpha=6, target_modules=linears, task_type=task, **options)


METHODS: dict[str, Callable[[str, list[str], str], Any]] = {
    "LoRA": lambda model, linears, task: _lora(linears, task),
    "LoRA, experts": lambda model, linears, task: (
        _lora(linears, task, target_parameters=_EXPERTS) if model in ("Mixtral", "GPT-OSS") else None
    ),
    "LoRA, modules to save": lambda model, linears, task: _lora(linears, task, modules_to_save=["lm_head"]),
    "LoRA, trainable tokens": lambda model, linears, task: _lora(
        linears,
        task,
        trainable_token_indices={"shared" if model == "T5" else "embed_tokens": batch()["input_ids"][0, :3].tolist()},
    ),
    "DoRA": lambda model, linears, task: _lora(linears, task, use_dora=True),
    "rsLoRA": lambda model, linears, task: _lora(linears, task, use_rslora=True),
    "PiSSA": lambda model, linears, task: _lora(linears, task, init_lora_weights="pissa"),
    "OLoRA": lambda model, linears, task: _lora(linears, task, init_lora_weights="olora"),
    "IA3": lambda model, linears, task: peft.IA3Config(
        target_modules=linears, feedforward_modules=linears[4:] or linears[3:], task_type=task
    ),
    "LoHa": lambda model, linears, task: peft.LoHaConfig(r=2, alpha=2, target_modules=linears, task_type=task),
    "LoKr": lambda model, linears, task: peft.LoKrConfig(r=2, alpha=2, target_modules=linears, task_type=task),
    "VeRA": lambda model, linears, task: peft.VeraConfig(r=4, target_modules=linears[:1], task_type=task),
    "LN tuning": lambda model, linears, task: peft.LNTuningConfig(
        task_type=task, target_modules=["layer_norm"] if model == "T5" else ["input_layernorm", "norm"]
    ),
    "prompt tuning": lambda model, linears, task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "P-tuning": lambda model, linears, task: peft.PromptEncoderConfig(
        task_type=task, num_virtual_tokens=3, encoder_hidden_size=16
    ),
    "prefix tuning": lambda model, linears, task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    "AdaLoRA": lambda model, linears, task: peft.AdaLoraConfig(
        target_modules=linears, task_type=task, total_step=STEPS, tinit=2, tfinal=5, init_r=3, target_r=2
    ),
    "OFT": lambda model, linears, task: peft.OFTConfig(oft_block_size=8, target_modules=linears[:4], task_type=task),
    "BOFT": lambda model, linears, task: peft.BOFTConfig(boft_block_size=4, target_modules=linears, task_type=task),
}
"""Method -> its config for a model; None where it has none."""


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    rank.run(job, lambda: {method: compare(job, method) for method in job.methods})


def compare(job: Job, method: str) -> dict[str, Any] | None:
    """Train `method` on ranks and in one process; the differences, or the error that refuses it, the same on all."""
    linears = _LINEARS.get(job.model, _ATTENTION)
    config = METHODS[method](job.model, linears, "SEQ_2_SEQ_LM" if job.model == "T5" else "CAUSAL_LM")
    if config is None:
        return None
    cls = AutoModelForSeq2SeqLM if job.model == "T5" else AutoModelForCausalLM
    one = train(adapt(cls.from_pretrained(job.folder), config))
    try:
        ours = train(adapt(cls.from_pretrained(job.folder, tp_plan="auto"), config))
    except tp_transformers.UnsupportedError as error:
        return {"refused": str(error)}
    model, plain = ours[0], one[0]
    params = dict(model.named_parameters())
    found = {
        "losses": max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours[1], one[1], strict=True)),
        "fell": [one[1][0], one[1][-1]],
        "weights": max(
            relative(tp_transformers.full_tensor(params[name]), param)
            for name, param in plain.named_parameters()
            if param.requires_grad
        ),
    }
    expected = logits(model)
    target = f"{job.folder}-{method}-{job.size}"
    model.save_pretrained(target)
    dist.barrier()
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(cls.from_pretrained(job.folder), target, is_trainable=method == "AdaLoRA")
    found["loaded in one process"] = relative(logits(again), expected)
    if hasattr(model.base_model, "merge_and_unload"):
        found["merged"] = relative(logits(model.merge_and_unload()), expected)
    return found


def adapt(model: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, copy.deepcopy(config))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def train(model: Any) -> tuple[Any, list[float]]:
    """The model after STEPS steps, and the loss of each."""
    # A large epsilon: steps that go by the sign of a gradient alone would show rounding.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        loss = model.train()(**batch()).loss
        loss.backward()
        optimizer.step()
        if hasattr(model.base_model, "update_and_allocate"):  # AdaLoRA
            model.base_model.update_and_allocate(index)
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(**batch()).logits
    return result


if __name__ == "__main__":
    main()
