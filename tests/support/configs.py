"""Settings of tiny configs: in which an architecture differs from `sizes`.

Each function takes (query heads, KV heads, whether widths are odd) and returns arguments of the config, or makes such
a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Gemma3TextConfig, PreTrainedConfig, Qwen2VLTextConfig

from tests.support.models import HEAD_DIM, PAD
from tests.support.sizes import IDS, sized

Settings = Callable[[int, int, bool], dict[str, Any]]
SHORT = {"length": 16, "tie_word_embeddings": True}


def sizes(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    """Sizes of a text model."""
    widths = {"width": heads * HEAD_DIM, "inner": 101 if odd else 96}
    counts = {"layers": 2, "heads": heads, "kv_heads": kv, "length": 64}
    return {**IDS, **widths, **counts, "std": 0.2, "tie_word_embeddings": False}


def plain(**changes: Any) -> Settings:
    return lambda *_: changes


SAME = plain()


def mixture(width: str = "moe_intermediate_size", shared: str | None = None, **changes: Any) -> Settings:
    """A mixture of 4 experts, of which each token takes 2; `width` and `shared`: the settings of experts' widths."""

    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        own = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
        own[width] = 44 if odd else 32  # grouped matmuls want multiples of 16 bytes, also in one process
        if shared is not None:
            own[shared] = 37 if odd else 48
        return own

    return settings


def deepseek(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 44 if odd else 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def llama4(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "head_dim": HEAD_DIM,
        "inner": 44 if odd else 32,
        "intermediate_size_mlp": 101 if odd else 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    }


def falcon(**changes: Any) -> Settings:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        old = kv == heads  # Falcon-RW: one KV head for every query head, and biases
        return {"new_decoder_architecture": not old and kv > 1, "multi_query": kv == 1, "bias": old, **changes}

    return settings


def opt(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {**SHORT, "word_embed_proj_dim": heads * HEAD_DIM}


def t5(**changes: Any) -> Settings:
    own = {"d_kv": HEAD_DIM, "relative_attention_num_buckets": 8, "decoder_start_token_id": PAD}
    return plain(**{**own, "tie_word_embeddings": True, **changes})


IMAGE_TOKEN, VISION_START = 30, 31
PATCH, GRID = 4, 4
IDS_AROUND = {name: IDS[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def text(kind: type[PreTrainedConfig], heads: int, kv: int, odd: bool, **changes: Any) -> dict[str, Any]:
    """Settings of the config of a text model within another config."""
    found = sized(kind, sizes(heads, kv, odd), changes)
    found.pop("tie_word_embeddings", None)
    return found


def qwen_vl(tower: Callable[[int, bool], dict[str, Any]]) -> Settings:
    def settings(heads: int, kv: int, odd: bool) -> dict[str, Any]:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
        seeing = {"depth": 2, "num_heads": 3 if odd else 4, "patch_size": PATCH}
        return {
            "text_config": text(Qwen2VLTextConfig, heads, kv, odd, rope_parameters=rope),
            "vision_config": seeing | tower(heads * HEAD_DIM, odd),
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 32,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": 33,
            **IDS_AROUND,
            "tie_word_embeddings": False,
        }

    return settings


def gemma3(heads: int, kv: int, odd: bool) -> dict[str, Any]:
    return {
        "text_config": text(Gemma3TextConfig, heads, kv, odd, head_dim=HEAD_DIM, sliding_window=4),
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
        **IDS_AROUND,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }


def tower(width: int, odd: bool) -> dict[str, Any]:
    return {"embed_dim": 48, "hidden_size": width, "mlp_ratio": 2}


def tower_2_5(width: int, odd: bool) -> dict[str, Any]:
    blocks = {"window_size": 8, "fullatt_block_indexes": [1]}
    return {"hidden_size": 48, "out_hidden_size": width, "intermediate_size": 101 if odd else 96, **blocks}
