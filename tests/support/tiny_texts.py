"""Tiny models of those types that share a plan with others: language models, some of which see."""

from __future__ import annotations

from typing import Any

from tests.support import tiny_inputs as given
from tests.support.models import HEAD_DIM, VOCAB
from tests.support.tiny_inputs import HEADS
from tests.support.tiny_model import FROM_IMAGES, SIGHT, WIDTH, Tiny

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 4,
}
DECODES = {"is_decoder": True}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 44),  # grouped matmuls want multiples of 16 bytes
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TWELVE_HEADS = {"width": 96, "heads": 12, "kv_heads": 12}
TWO_GROUPS = {"width": 64, "heads": 8, "kv_heads": 4}
KOSMOS = {"embed_dim": WIDTH}
SHORT_CONVOLUTIONS = {
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_head_dim": HEAD_DIM,
    "unpadded_vocab_size": VOCAB,
    "d_rel": 4,
}
STACKED = {
    "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 37, "moe_num_experts": 4, "moe_top_k": 2},
}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
TEXTS = {
    "gpt_neo": Tiny("GPTNeo", {"attention_types": [[["global", "local"], 1]]}),
    "ctrl": Tiny("CTRL", head="CTRLLMHeadModel", since="5.17"),
    "stablelm, parallel": Tiny("StableLm", {"use_parallel_residual": True}),
    "modernbert-decoder": Tiny("ModernBertDecoder", {"local_attention": 4}),
    "bert": Tiny("Bert", DECODES, head="BertLMHeadModel"),
    "bert, both ways": Tiny("Bert", head="BertForMaskedLM"),
    "roformer": Tiny("RoFormer", DECODES),
    "granitemoe": Tiny("GraniteMoe", EXPERTS),
    "granitemoeshared": Tiny("GraniteMoeShared", {**EXPERTS, "shared_intermediate_size": 37}),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybrid",
        {**EXPERTS, "shared_intermediate_size": 37, "layer_types": ["mamba", "attention"], "mamba_n_heads": 2 * HEADS},
    ),
    "phimoe": Tiny("Phimoe", EXPERTS),
    "jamba": Tiny(
        "Jamba",
        {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    ),
    "hunyuan_vl_text": Tiny(
        "HunYuanVLText", {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 1, 1]}}, head="HunYuanVLTextModel"
    ),
    "hunyuan_v1_moe": Tiny("HunYuanMoEV1", EXPERTS),
    "lfm2_moe": Tiny("Lfm2Moe", {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "afmoe": Tiny("Afmoe", {**EXPERTS, "num_dense_layers": 1, "global_attn_every_n_layers": 2}),
    "glm4_moe_lite": Tiny("Glm4MoeLite", {**EXPERTS, **LATENT}),
    "gemma4_text, keys as values": Tiny(
        "Gemma4Text",
        {
            **TWO_GROUPS,
            "num_key_value_heads": 8,
            "num_hidden_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 4,
            "global_head_dim": 2 * HEAD_DIM,
            **PER_LAYER,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 44,
            "num_kv_shared_layers": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 4,
        },
    ),
    "gemma4_text, keys of other layers": Tiny(
        "Gemma4Text",
        {
            **TWO_GROUPS,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            **PER_LAYER,
            "global_head_dim": 2 * HEAD_DIM,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 4,
        },
    ),
    "mllama_text_model": Tiny(
        "MllamaText", {"cross_attention_layers": [1], "rope_parameters": ROPE}, inputs=given.seen_tokens
    ),
    "blip_text_model": Tiny("BlipText", {**DECODES, **FROM_IMAGES}, head="BlipTextLMHeadModel"),
    "git": Tiny("Git", {"vision_config": SIGHT}, inputs=given.text_and_images, since="5.23"),
    "diffllama": Tiny("DiffLlama", TWO_GROUPS),
    "emu3_text_model": Tiny("Emu3Text", {"rope_parameters": ROPE}),
    "codegen": Tiny("CodeGen", {**TWELVE_HEADS, "rotary_dim": 4}),
    "youtu": Tiny("Youtu", LATENT),
    "kosmos_2_text_model": Tiny("Kosmos2Text", KOSMOS, head="Kosmos2TextForCausalLM"),
    "kosmos_2_5_text_model": Tiny("Kosmos2_5Text", KOSMOS, head="Kosmos2_5TextForCausalLM"),
    "inkling2_text": Tiny("Inkling2Text", {**EXPERTS, **SHORT_CONVOLUTIONS}),
    "inkling2_loop_text": Tiny("Inkling2LoopText", {**EXPERTS, **SHORT_CONVOLUTIONS}),
    "muse_spark_text": Tiny(
        "MuseSparkText",
        {**EXPERTS, "moe_hidden_size": 16, "layer_types": ["sliding_attention", "full_attention"]},
        head="MuseSparkTextModel",
    ),
    "glm5_next_text": Tiny(
        "Glm5NextText",
        {
            **EXPERTS,
            **LATENT,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        head="Glm5NextTextModel",
        since="5.23",
    ),
    "nemotron_h": Tiny(
        "NemotronH", {**EXPERTS, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4}
    ),
    "gpt_bigcode, all keys": Tiny("GPTBigCode", {"multi_query": False}),
    "jetmoe": Tiny(
        "JetMoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "kv_channels": HEAD_DIM,
            "num_hidden_layers": 3,
            "num_key_value_heads": 5,
            "num_attention_heads": 10,
        },
    ),
    "gemma3n_text": Tiny(
        "Gemma3nText",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "intermediate_size": [50, 50, 50],
            "activation_sparsity_pattern": [0.95, 0.0, 0.0],
            "layer_types": ["full_attention"] * 3,
            "num_kv_shared_layers": 1,
            **PER_LAYER,
            "laurel_rank": 4,
        },
    ),
    "zaya": Tiny("Zaya", {**EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 3}),
    "dbrx": Tiny("Dbrx", STACKED, since="5.17"),
    "hy_v4": Tiny("HYV4", {**EXPERTS, **LATENT, "index_topk": 4}),
    "hy_v4_vl_text": Tiny(
        "HYV4VLText",
        {**EXPERTS, **LATENT, "index_topk": 4, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
        head="HYV4VLTextModel",
    ),
    "axk2": Tiny("AXK2", {**EXPERTS, **LATENT, "index_topk": 4}),
}
