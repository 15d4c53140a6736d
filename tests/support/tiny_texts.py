"""Tiny models of those types that share a plan with others: language models, some of which see."""

from __future__ import annotations

from typing import Any

from tests.support.models import HEAD_DIM, VOCAB
from tests.support.tiny_inputs import (
    HEADS,
    seen_tokens,
    text_and_images,
    tokens,
)
from tests.support.tiny_model import FROM_IMAGES, SIGHT, Tiny

LATENT: tuple[tuple[str, Any], ...] = (
    ("kv_lora_rank", 16),
    ("q_lora_rank", 16),
    ("qk_rope_head_dim", 4),
    ("qk_nope_head_dim", 8),
    ("v_head_dim", 12),
    ("head_dim", 4),
)
DECODES = (("is_decoder", True),)
EXPERTS: tuple[tuple[str, Any], ...] = (
    *dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4).items(),
    *dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2).items(),
    ("intermediate_size", 44),  # grouped matmuls want multiples of 16 bytes, also in one process
    ("moe_intermediate_size", 44),
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TWELVE_HEADS = (
    ("hidden_size", 96),
    ("n_embd", 96),
    ("num_attention_heads", 12),
    ("n_head", 12),
    ("num_key_value_heads", 12),
)
TWO_GROUPS = (
    ("hidden_size", 64),
    ("n_embd", 64),
    ("num_attention_heads", 8),
    ("n_head", 8),
    ("num_key_value_heads", 4),
)
KOSMOS = (("embed_dim", HEADS * HEAD_DIM), ("layers", 2))
SHORT_CONVOLUTIONS = (
    ("num_hidden_layers", 3),
    ("layer_types", ["hybrid_sliding", "hybrid", "hybrid"]),
    ("swa_num_attention_heads", HEADS),
    ("swa_num_key_value_heads", HEADS),
    ("swa_head_dim", HEAD_DIM),
    ("unpadded_vocab_size", VOCAB),
    ("d_rel", 4),
)
STACKED = (
    ("d_model", HEADS * HEAD_DIM),
    ("attn_config", {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8}),
    ("ffn_config", {"ffn_hidden_size": 37, "moe_num_experts": 4, "moe_top_k": 2}),
)
TEXTS = {
    "gpt_neo": Tiny("GPTNeoConfig", "GPTNeoForCausalLM", tokens, (("attention_types", [[["global", "local"], 1]]),)),
    "ctrl": Tiny("CTRLConfig", "CTRLLMHeadModel", tokens, since="5.17"),
    "stablelm, parallel": Tiny("StableLmConfig", "StableLmForCausalLM", tokens, (("use_parallel_residual", True),)),
    "modernbert-decoder": Tiny(
        "ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", tokens, (("local_attention", 4),)
    ),
    "bert": Tiny("BertConfig", "BertLMHeadModel", tokens, DECODES),
    "bert, both ways": Tiny("BertConfig", "BertForMaskedLM", tokens),
    "roformer": Tiny("RoFormerConfig", "RoFormerForCausalLM", tokens, DECODES),
    "granitemoe": Tiny("GraniteMoeConfig", "GraniteMoeForCausalLM", tokens, EXPERTS),
    "granitemoeshared": Tiny(
        "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", tokens, (*EXPERTS, ("shared_intermediate_size", 37))
    ),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        tokens,
        (
            *EXPERTS,
            ("shared_intermediate_size", 37),
            ("layer_types", ["mamba", "attention"]),
            ("mamba_n_heads", 2 * HEADS),
        ),
    ),
    "phimoe": Tiny("PhimoeConfig", "PhimoeForCausalLM", tokens, EXPERTS),
    "jamba": Tiny(
        "JambaConfig",
        "JambaForCausalLM",
        tokens,
        (
            *EXPERTS,
            ("attn_layer_period", 2),
            ("attn_layer_offset", 1),
            ("expert_layer_offset", 1),
            ("mamba_dt_rank", 4),
        ),
    ),
    "hunyuan_vl_text": Tiny(
        "HunYuanVLTextConfig",
        "HunYuanVLTextModel",
        tokens,
        (("rope_parameters", {**ROPE, "mrope_section": [1, 1, 1, 1]}),),
    ),
    "hunyuan_v1_moe": Tiny("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", tokens, EXPERTS),
    "lfm2_moe": Tiny(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        tokens,
        (*EXPERTS, ("layer_types", ["conv", "full_attention"]), ("num_dense_layers", 1)),
    ),
    "afmoe": Tiny(
        "AfmoeConfig",
        "AfmoeForCausalLM",
        tokens,
        (*EXPERTS, ("num_dense_layers", 1), ("global_attn_every_n_layers", 2)),
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", tokens, (*EXPERTS, *LATENT)),
    "gemma4_text, keys as values": Tiny(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        tokens,
        (
            *TWO_GROUPS,
            ("num_key_value_heads", 8),
            ("num_hidden_layers", 3),
            ("attention_k_eq_v", True),
            ("num_global_key_value_heads", 4),
            ("global_head_dim", 2 * HEAD_DIM),
            ("vocab_size_per_layer_input", VOCAB),
            ("hidden_size_per_layer_input", 0),
            ("enable_moe_block", True),
            ("num_experts", 4),
            ("top_k_experts", 2),
            ("moe_intermediate_size", 44),
            ("num_kv_shared_layers", 0),
            ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
            ("sliding_window", 4),
        ),
    ),
    "gemma4_text, keys of other layers": Tiny(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        tokens,
        (
            *TWO_GROUPS,
            ("num_hidden_layers", 4),
            ("num_kv_shared_layers", 2),
            ("vocab_size_per_layer_input", VOCAB),
            ("hidden_size_per_layer_input", 8),
            ("global_head_dim", 2 * HEAD_DIM),
            ("layer_types", ["sliding_attention", "full_attention"] * 2),
            ("sliding_window", 4),
        ),
    ),
    "mllama_text_model": Tiny(
        "MllamaTextConfig",
        "MllamaForCausalLM",
        seen_tokens,
        (("cross_attention_layers", [1]), ("rope_parameters", ROPE)),
    ),
    "blip_text_model": Tiny("BlipTextConfig", "BlipTextLMHeadModel", tokens, (*DECODES, *FROM_IMAGES)),
    "git": Tiny("GitConfig", "GitForCausalLM", text_and_images, (("vision_config", SIGHT),), since="5.23"),
    "diffllama": Tiny("DiffLlamaConfig", "DiffLlamaForCausalLM", tokens, TWO_GROUPS),
    "emu3_text_model": Tiny("Emu3TextConfig", "Emu3ForCausalLM", tokens, (("rope_parameters", ROPE),)),
    "codegen": Tiny("CodeGenConfig", "CodeGenForCausalLM", tokens, (*TWELVE_HEADS, ("rotary_dim", 4))),
    "youtu": Tiny("YoutuConfig", "YoutuForCausalLM", tokens, LATENT),
    "kosmos_2_text_model": Tiny("Kosmos2TextConfig", "Kosmos2TextForCausalLM", tokens, KOSMOS),
    "kosmos_2_5_text_model": Tiny("Kosmos2_5TextConfig", "Kosmos2_5TextForCausalLM", tokens, KOSMOS),
    "inkling2_text": Tiny("Inkling2TextConfig", "Inkling2ForCausalLM", tokens, (*EXPERTS, *SHORT_CONVOLUTIONS)),
    "inkling2_loop_text": Tiny(
        "Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", tokens, (*EXPERTS, *SHORT_CONVOLUTIONS)
    ),
    "muse_spark_text": Tiny(
        "MuseSparkTextConfig",
        "MuseSparkTextModel",
        tokens,
        (*EXPERTS, ("moe_hidden_size", 16), ("layer_types", ["sliding_attention", "full_attention"])),
    ),
    "glm5_next_text": Tiny(
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        tokens,
        (
            *EXPERTS,
            *LATENT,
            ("qk_rope_head_dim", 0),
            ("layer_types", ["linear_attention", "indexed_attention"]),
            ("mlp_layer_types", ["dense", "sparse"]),
        ),
        since="5.23",
    ),
    "nemotron_h": Tiny(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        tokens,
        (*EXPERTS, ("layers_block_type", ["mamba", "attention", "mlp", "moe"]), ("num_hidden_layers", 4)),
    ),
    "gpt_bigcode, all keys": Tiny("GPTBigCodeConfig", "GPTBigCodeForCausalLM", tokens, (("multi_query", False),)),
    "jetmoe": Tiny(
        "JetMoeConfig",
        "JetMoeForCausalLM",
        tokens,
        (
            ("num_local_experts", 4),
            ("num_experts_per_tok", 2),
            ("kv_channels", HEAD_DIM),
            ("num_hidden_layers", 3),
            ("num_key_value_heads", 5),
            ("num_attention_heads", 10),  # one for each expert of a token
        ),
    ),
    "gemma3n_text": Tiny(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        tokens,
        (
            ("num_hidden_layers", 3),
            ("num_key_value_heads", 1),
            ("intermediate_size", [50, 50, 50]),
            ("activation_sparsity_pattern", [0.95, 0.0, 0.0]),
            ("layer_types", ["full_attention"] * 3),
            ("num_kv_shared_layers", 1),
            ("vocab_size_per_layer_input", VOCAB),
            ("hidden_size_per_layer_input", 8),
            ("laurel_rank", 4),
        ),
    ),
    "zaya": Tiny(
        "ZayaConfig", "ZayaForCausalLM", tokens, (*EXPERTS, ("num_experts_per_tok", 1), ("num_hidden_layers", 3))
    ),
    "dbrx": Tiny("DbrxConfig", "DbrxForCausalLM", tokens, STACKED, since="5.17"),
    "hy_v4": Tiny("HYV4Config", "HYV4ForCausalLM", tokens, (*EXPERTS, *LATENT, ("index_topk", 4))),
    "hy_v4_vl_text": Tiny(
        "HYV4VLTextConfig",
        "HYV4VLTextModel",
        tokens,
        (*EXPERTS, *LATENT, ("index_topk", 4), ("rope_parameters", {**ROPE, "mrope_section": [1, 1, 0]})),
    ),
    "axk2": Tiny("AXK2Config", "AXK2ForCausalLM", tokens, (*EXPERTS, *LATENT, ("index_topk", 4))),
}
