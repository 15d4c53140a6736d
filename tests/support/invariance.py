"""Models for tests of invariant plans, and all of their results that have to keep their bits.

Widths are those of real models, since products of a few features have other kernels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tp_transformers

WIDTHS = {
    "vocab_size": 1000,
    "hidden_size": 576,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Those of SmolLM2, with fewer layers and words."""
MIXTURE = WIDTHS | {"intermediate_size": 256, "num_local_experts": 5, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", WIDTHS | {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", MIXTURE),
    "qwen3": ("Qwen3", WIDTHS | {"head_dim": 64}),
    "qwen3_moe": (
        "Qwen3Moe",
        WIDTHS | {"head_dim": 64, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    ),
    "phi3": ("Phi3", WIDTHS),
    "olmo2": ("Olmo2", WIDTHS | {"num_key_value_heads": 9}),
    "gpt2": (  # with dropout of embeddings, attention and residuals
        "GPT2",
        {"vocab_size": 1003, "n_embd": 576, "n_head": 9, "n_layer": 2, "eos_token_id": None},
    ),
    "gemma3": ("Gemma3Text", WIDTHS | {"head_dim": 64, "sliding_window": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        WIDTHS
        | {"num_key_value_heads": 9, "first_k_dense_replace": 1, "moe_intermediate_size": 256, "n_routed_experts": 8}
        | {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "q_lora_rank": 192, "kv_lora_rank": 128}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    ),
    "gpt_oss": (
        "GptOss",
        MIXTURE | {"head_dim": 64, "sliding_window": 16, "rope_parameters": {"rope_type": "default"}},
    ),
    "falcon": ("Falcon", WIDTHS | {"num_kv_heads": 3, "new_decoder_architecture": True, "bias": False}),
    "bloom": (
        "Bloom",
        {"vocab_size": 1000, "hidden_size": 576, "n_layer": 2, "n_head": 9, "eos_token_id": None}
        | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    ),
    "longt5": (  # as t5; attends in blocks, of as many keys as two ranks have features each
        "LongT5",
        {"vocab_size": 1000, "d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 768, "num_layers": 2}
        | {"decoder_start_token_id": 0, "eos_token_id": None, "feed_forward_proj": "gated-gelu"},
    ),
    "t5": (  # an encoder and a decoder; with dropout of attention and of its MLPs' features
        "T5",
        {"vocab_size": 1000, "d_model": 576, "d_kv": 64, "num_heads": 9, "d_ff": 768, "num_layers": 2}
        | {"decoder_start_token_id": 0, "eos_token_id": None, "feed_forward_proj": "gated-gelu"},
    ),
}
"""Name -> (prefix of its config class, arguments)."""
STEPS = 3


def save(factory: pytest.TempPathFactory, name: str, **changes: Any) -> str:
    """Save a random model of MODELS, with `changes` of its config, in a new folder; returns the folder."""
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings | changes)
    model = auto_class(config).from_config(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param), alpha=0.1)
    model.get_input_embeddings().weight.data[::7, ::5] = -0.0
    folder = str(factory.mktemp(name))
    model.save_pretrained(folder)
    return folder


def auto_class(config: transformers.PretrainedConfig) -> Any:
    """The class of transformers that loads a checkpoint of `config`."""
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def prompts(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask with left padding: (3, 48)."""
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (3, 48))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return ids, mask


def observe(model: Any, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Embeddings, logits of 1 to 48 tokens, also left-padded, of the last ones alone, and with frozen weights; tokens
    and their logits, and what `train` returns.
    """
    ids, mask = prompts(model)
    seen: dict[str, torch.Tensor] = {}
    model.eval()
    target = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        seen["embeddings"] = model.get_input_embeddings()(ids)
        for length in (1, 2, 5, 7, 9, 10, 11, 48):
            seen[f"logits of {length}"] = model(ids[:, :length], **target).logits
        seen["padded logits"] = model(ids, attention_mask=mask, **target).logits
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            seen["last logits"] = model(ids[:, :9], logits_to_keep=1).logits
            seen["last logits of frozen weights"] = model.requires_grad_(False)(ids[:, :9], logits_to_keep=2).logits
            model.requires_grad_(True)
    for draws in (False, True):
        options = {"max_new_tokens": 12, "do_sample": draws, "pad_token_id": 0, "return_dict_in_generate": True}
        made = model.generate(ids[:, :9], attention_mask=mask[:, :9], output_logits=True, **options)
        seen[f"tokens, sampled {draws}"], seen[f"their logits {draws}"] = made.sequences, torch.stack(made.logits)
    return seen | train(model, model, ids, steps)


def train(model: Any, forward: Callable[..., Any], ids: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """Training by a model's `forward`: losses, norms of gradients, gradients of the first step, weights.

    The third step has as few tokens as ranks have heads.
    """
    full = tp_transformers.full_tensor
    seen: dict[str, torch.Tensor] = {}
    others = [param for param in model.parameters() if param.ndim != 2]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)  # of dropout
        tokens = ids[:, :3].contiguous() if step == 2 else ids
        loss = forward(tokens, labels=tokens).loss
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for name, param in model.named_parameters() if step == 0 else ():
            grad = full(param, param.grad)
            seen |= {} if grad is None else {f"gradient of {name}": grad}
        seen[f"norm of norms, biases and experts {step}"] = nn.utils.clip_grad_norm_(others, math.inf)
        seen[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"trained {name}": full(param) for name, param in model.named_parameters()}


def has_bits(x: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if two tensors are equal, with the signs of their zeros."""
    return torch.equal(x, expected) and torch.equal(x.signbit(), expected.signbit())
