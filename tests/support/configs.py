"""Settings of tiny configs, in the names that each architecture has for them.

Each function takes (query heads, KV heads, whether widths are odd) and returns arguments of the config, or makes such
a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.models import HEAD_DIM, PAD, VOCAB


def text_settings(heads: int, kv: int, odd: bool, **changes: Any) -> dict[str, Any]:
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


def plain(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
    return lambda heads, kv, odd: text_settings(heads, kv, odd, **changes)


def mixture(
    width: str = "moe_intermediate_size", shared: str | None = None, **changes: Any
) -> Callable[[int, int, bool], dict[str, Any]]:
    """A mixture of 4 experts, of which each token takes 2; `width` and `shared`: the settings of experts' widths."""

    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        own = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
        own[width] = 44 if odd else 32  # grouped matmuls want multiples of 16 bytes, also in one process
        if shared is not None:
            own[shared] = 37 if odd else 48
        return text_settings(heads, kv, odd, **own)

    return settings


def deepseek(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return text_settings(
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


def llama4(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return text_settings(
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


def gpt2(heads: int, kv: int, odd: bool) -> dict[str, Any]:
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
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # of GPT-2's family alone, they are not 0
    }


def bloom(heads: int, kv: int, odd: bool) -> dict[str, Any]:
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


def falcon(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
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
        return text_settings(heads, kv, odd, **own)

    return settings


def opt(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        **text_settings(heads, kv, odd),
        "ffn_dim": 101 if odd else 96,
        "init_std": 0.2,
        "max_position_embeddings": 16,
        "word_embed_proj_dim": heads * HEAD_DIM,
        "tie_word_embeddings": True,
    }


def t5(**changes: Any) -> Callable[[int, int, bool], dict[str, Any]]:
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


def bart(heads: int, kv: int, odd: bool) -> dict[str, Any]:
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


def qwen_vl(tower: Callable[[int, bool], dict[str, Any]]) -> Callable[[int, int, bool], dict[str, Any]]:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        text = text_settings(heads, kv, odd)
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


def gemma3(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    text = text_settings(heads, kv, odd, head_dim=HEAD_DIM, sliding_window=4)
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


def tower(width: int, odd: bool) -> dict[str, Any]:
    return {"embed_dim": 48, "hidden_size": width, "mlp_ratio": 2}


def tower_2_5(width: int, odd: bool) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "out_hidden_size": width,
        "intermediate_size": 101 if odd else 96,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }
