"""Every architecture that has a plan: a tiny random model of it in any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from tests.support.models import HEAD_DIM, MASK, PAD, PROMPTS, VOCAB, Case

Variant = tuple[int, int]
"""(query heads, KV heads)."""

GROUPED: tuple[Variant, ...] = ((8, 4), (8, 2), (8, 1), (6, 3), (9, 3))
MULTI_HEAD: tuple[Variant, ...] = ((8, 8), (6, 6), (9, 9))
"""For architectures whose config cannot say how many KV heads there are."""


@dataclass(frozen=True)
class Architecture:
    """How to make a tiny model of one architecture, and what its plan has to reach."""

    config: str
    """Name of the config class in transformers."""
    model: str
    """Name of the model class in transformers."""
    settings: Callable[[int, int, bool], dict[str, Any]]
    """(query heads, KV heads, whether widths are odd) -> arguments of the config."""
    variants: tuple[Variant, ...] = GROUPED
    share: float = 0.53
    """Largest share of the bytes that one of 2 ranks may hold, in the even variants."""

    def make(self, heads: int, kv_heads: int) -> PreTrainedModel:
        """A random model, whose norms and biases are random too."""
        config: PreTrainedConfig = getattr(transformers, self.config)(
            **self.settings(heads, kv_heads, heads % 2 == 1 or heads % 4 == 2)
        )
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, self.model)(config)
        model.eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.ndim == 1 or "norm" in name:
                    param.add_(torch.randn_like(param) * 0.2)
                elif param.std() < 0.1:
                    param.normal_(std=0.2)
        return model


def _text(heads: int, kv: int, odd: bool, **changes: Any) -> dict[str, Any]:
    """What most text configs call things."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": 101 if odd else 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **changes,
    }


def _plain(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
    return lambda heads, kv, odd: _text(heads, kv, odd, **changes)


def _mixture(
    width: str = "moe_intermediate_size", shared: str | None = None, **changes: Any
) -> Callable[[int, int, bool], dict[str, Any]]:
    """A mixture of 4 experts, of which each token takes 2; `width` and `shared`: the settings of experts' widths."""

    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        own = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
        own[width] = 44 if odd else 32  # grouped matmuls want multiples of 16 bytes, also in one process
        if shared is not None:
            own[shared] = 37 if odd else 48
        return _text(heads, kv, odd, **own)

    return settings


def _deepseek(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return _text(
        heads,
        heads,
        odd,
        num_hidden_layers=3,
        moe_intermediate_size=44 if odd else 32,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )


def _llama4(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return _text(
        heads,
        kv,
        odd,
        head_dim=HEAD_DIM,
        intermediate_size=44 if odd else 32,
        intermediate_size_mlp=101 if odd else 96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=32,
    )


def _gpt2(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "n_embd": heads * HEAD_DIM,
        "n_layer": 2,
        "n_head": heads,
        "n_inner": 101 if odd else 96,
        "n_positions": 16,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }


def _bloom(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * HEAD_DIM,
        "n_layer": 2,
        "n_head": heads,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }


def _falcon(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        old = kv == heads  # Falcon-RW: one KV head for every query head, and biases
        own = {
            "num_kv_heads": kv,
            "new_decoder_architecture": not old and kv > 1,
            "multi_query": kv == 1,
            "bias": old,
            "ffn_hidden_size": 101 if odd else 96,
            **changes,
        }
        return _text(heads, kv, odd, **own)

    return settings


def _opt(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        **_text(heads, kv, odd),
        "ffn_dim": 101 if odd else 96,
        "init_std": 0.2,
        "max_position_embeddings": 16,
        "word_embed_proj_dim": heads * HEAD_DIM,
        "tie_word_embeddings": True,
    }


def _t5(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        return {
            "vocab_size": VOCAB,
            "d_model": heads * HEAD_DIM,
            "d_kv": HEAD_DIM,
            "d_ff": 101 if odd else 96,
            "num_layers": 2,
            "num_heads": heads,
            "relative_attention_num_buckets": 8,
            "pad_token_id": PAD,
            "eos_token_id": None,
            "decoder_start_token_id": PAD,
            **changes,
        }

    return settings


def _bart(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "d_model": heads * HEAD_DIM,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 101 if odd else 96,
        "decoder_ffn_dim": 101 if odd else 96,
        "max_position_embeddings": 16,
        "init_std": 0.2,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }


IMAGE_TOKEN, VISION_START = 30, 31
PATCH, GRID = 4, 4


def _qwen_vl(tower: Callable[[int, bool], dict[str, Any]]) -> Callable[[int, int, bool], dict[str, Any]]:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        text = _text(heads, kv, odd)
        del text["tie_word_embeddings"]
        return {
            "text_config": {**text, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 2,
                "num_heads": 3 if odd else 4,
                "patch_size": PATCH,
                **tower(heads * HEAD_DIM, odd),
            },
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 32,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": 33,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": PAD,
            "tie_word_embeddings": False,
        }

    return settings


def _gemma3(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    text = _text(heads, kv, odd, head_dim=HEAD_DIM, sliding_window=4)
    del text["tie_word_embeddings"]
    return {
        "text_config": text,
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 101 if odd else 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3 if odd else 4,
            "image_size": GRID * PATCH,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": GRID * GRID // 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_START + 1,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }


def _tower(width: int, odd: bool) -> dict[str, Any]:
    return {"embed_dim": 48, "hidden_size": width, "mlp_ratio": 2}


def _tower_2_5(width: int, odd: bool) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "out_hidden_size": width,
        "intermediate_size": 101 if odd else 96,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", _plain()),
    "mistral": Architecture("MistralConfig", "MistralForCausalLM", _plain(sliding_window=4)),
    "mixtral": Architecture("MixtralConfig", "MixtralForCausalLM", _mixture("intermediate_size")),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", _plain()),
    "qwen2_moe": Architecture(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", _mixture(shared="shared_expert_intermediate_size")
    ),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", _plain(head_dim=HEAD_DIM)),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", _mixture(head_dim=HEAD_DIM, mlp_only_layers=[0])
    ),
    "gemma": Architecture("GemmaConfig", "GemmaForCausalLM", _plain(head_dim=HEAD_DIM, tie_word_embeddings=True)),
    "gemma2": Architecture("Gemma2Config", "Gemma2ForCausalLM", _plain(head_dim=HEAD_DIM, sliding_window=4)),
    "gemma3_text": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", _plain(head_dim=HEAD_DIM, sliding_window=4)),
    "cohere": Architecture("CohereConfig", "CohereForCausalLM", _plain(tie_word_embeddings=True)),
    "cohere with q/k norms": Architecture("CohereConfig", "CohereForCausalLM", _plain(use_qk_norm=True)),
    "cohere2": Architecture("Cohere2Config", "Cohere2ForCausalLM", _plain(head_dim=HEAD_DIM, sliding_window=4)),
    "glm": Architecture("GlmConfig", "GlmForCausalLM", _plain(head_dim=HEAD_DIM, attention_bias=True)),
    "granite": Architecture("GraniteConfig", "GraniteForCausalLM", _plain()),
    "olmo": Architecture("OlmoConfig", "OlmoForCausalLM", _plain()),
    "olmo2": Architecture("Olmo2Config", "Olmo2ForCausalLM", _plain()),
    "phi": Architecture("PhiConfig", "PhiForCausalLM", _plain()),
    "phi with q/k norms": Architecture("PhiConfig", "PhiForCausalLM", _plain(qk_layernorm=True)),
    "phi3": Architecture("Phi3Config", "Phi3ForCausalLM", _plain()),
    "starcoder2": Architecture("Starcoder2Config", "Starcoder2ForCausalLM", _plain()),
    "llama4_text": Architecture("Llama4TextConfig", "Llama4ForCausalLM", _llama4),
    "gpt_oss": Architecture(
        "GptOssConfig", "GptOssForCausalLM", _mixture("intermediate_size", head_dim=HEAD_DIM, sliding_window=4)
    ),
    "deepseek_v3": Architecture("DeepseekV3Config", "DeepseekV3ForCausalLM", _deepseek, MULTI_HEAD, share=0.58),
    "gpt_neox": Architecture("GPTNeoXConfig", "GPTNeoXForCausalLM", _plain(), MULTI_HEAD),
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", _gpt2, MULTI_HEAD),
    "bloom": Architecture("BloomConfig", "BloomForCausalLM", _bloom, MULTI_HEAD),
    "falcon": Architecture("FalconConfig", "FalconForCausalLM", _falcon()),
    "falcon with alibi": Architecture("FalconConfig", "FalconForCausalLM", _falcon(alibi=True), MULTI_HEAD),
    "opt": Architecture("OPTConfig", "OPTForCausalLM", _opt, MULTI_HEAD),
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", _t5(), MULTI_HEAD),
    "t5 gated": Architecture(
        "T5Config",
        "T5ForConditionalGeneration",
        _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        MULTI_HEAD,
    ),
    "bart": Architecture("BartConfig", "BartForConditionalGeneration", _bart, MULTI_HEAD),
    "gemma3": Architecture("Gemma3Config", "Gemma3ForConditionalGeneration", _gemma3, share=0.60),
    "ministral": Architecture("MinistralConfig", "MinistralForCausalLM", _plain(head_dim=HEAD_DIM, sliding_window=4)),
    "olmo3": Architecture("Olmo3Config", "Olmo3ForCausalLM", _plain(sliding_window=4)),
    "qwen2_vl": Architecture("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", _qwen_vl(_tower), share=0.60),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", _qwen_vl(_tower_2_5), share=0.60
    ),
}


def make_case(folder: Path, name: str, heads: int, kv_heads: int) -> Case:
    """Write a random checkpoint, and the reference that one process computes from it."""
    model = ARCHITECTURES[name].make(heads, kv_heads)
    model.save_pretrained(folder / "first")
    # Loaded once: a model that was made keeps its tensors in another form than one that was loaded, if it is converted.
    model = type(model).from_pretrained(folder / "first")
    model.save_pretrained(folder / "checkpoint")
    torch.save(observe(model), folder / "reference.pt")
    return Case(str(folder / "checkpoint"), str(folder / "reference.pt"))


def observe(model: Any) -> dict[str, Any]:
    """What a model does, in numbers: logits and greedy tokens of a left-padded batch, loss and every gradient."""
    inputs, generated = inputs_of(model)
    with torch.no_grad():
        logits = model(**inputs).logits
    made = model.generate(**generated, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    model.zero_grad()
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    loss = model(**given, labels=labels).loss
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    lengths = {"context": made.past_key_values.get_seq_length(), "encoder_context": generated["input_ids"].shape[1]}
    return {
        "logits": logits,
        "tokens": made.sequences,
        "loss": loss.detach(),
        "grads": grads,
        "cache": (lengths, cache_bytes(made.past_key_values)),
    }


def cache_bytes(cache: Any) -> int:
    """Bytes of memory that a transformers cache keeps alive."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values))


def inputs_of(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments of the forward, arguments of generate) for a left-padded batch, with an image if the model sees."""
    text = {"input_ids": PROMPTS, "attention_mask": MASK}
    if model.config.is_encoder_decoder:
        return {**text, "decoder_input_ids": PROMPTS.flip(1)}, text
    if not hasattr(model.config, "vision_config"):
        return text, text
    images = torch.full((2, GRID * GRID // 4), IMAGE_TOKEN)
    start = torch.full((2, 1), VISION_START)
    torch.manual_seed(1)
    seeing = {
        "input_ids": torch.cat([PROMPTS[:, :3], start, images, PROMPTS[:, 3:]], 1),
        "attention_mask": torch.cat(
            [MASK[:, :3], torch.ones(2, 1 + images.shape[1], dtype=torch.long), MASK[:, 3:]], 1
        ),
    }
    is_image = (seeing["input_ids"] == IMAGE_TOKEN).long()
    if model.config.model_type == "gemma3":
        seeing |= {"pixel_values": torch.randn(2, 3, GRID * PATCH, GRID * PATCH), "token_type_ids": is_image}
    else:
        seeing |= {
            "pixel_values": torch.randn(2 * GRID * GRID, 3 * 2 * PATCH * PATCH),
            "image_grid_thw": torch.tensor([[1, GRID, GRID]] * 2),
            "mm_token_type_ids": is_image,
        }
    return seeing, seeing
