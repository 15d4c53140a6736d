"""Architectures in small that `suggest` and `tp_plan="infer"` are tried on; some have a plan by now."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.support.models import HEAD_DIM, PAD, VOCAB

CONFIGS: dict[str, str] = {
    "gptj": "GPTJForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "mpt": "MptForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "whisper": "WhisperForConditionalGeneration",
}
"""model_type -> the class of the model."""
DBRX_RUNS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)
"""Older releases of transformers build DBRX's router for another width than it is given."""
if not DBRX_RUNS:
    del CONFIGS["dbrx"]


def unplanned(model_type: str, heads: int = 8, kv_heads: int = 4) -> PreTrainedConfig:
    """A tiny config of one of CONFIGS."""
    width = heads * HEAD_DIM
    settings: dict[str, dict[str, Any]] = {
        "gptj": {"n_positions": 32, "n_embd": width, "n_layer": 2, "n_head": heads, "rotary_dim": 4, "n_inner": 101},
        "codegen": {
            "n_positions": 32, "n_ctx": 32, "n_embd": width, "n_layer": 2, "n_head": heads, "rotary_dim": 4,
            "n_inner": 96,
        },
        "mpt": {
            "d_model": width, "n_heads": heads, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2,
            "attn_config": {"clip_qkv": 4.0},
        },
        "dbrx": {
            "d_model": width, "n_heads": heads, "n_layers": 2, "max_seq_len": 32,
            "attn_config": {"kv_n_heads": kv_heads, "clip_qkv": 4.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 37, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": width},
        },
        "falcon_h1": {
            "hidden_size": width, "intermediate_size": 101, "num_hidden_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "mamba_d_ssm": 32, "mamba_n_heads": 4,
            "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8,
            "max_position_embeddings": 64,
        },
        "whisper": {
            "num_mel_bins": 8, "d_model": width, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": 101,
            "decoder_ffn_dim": 96, "max_source_positions": 12, "max_target_positions": 32,
            "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        },
    }  # fmt: skip
    ids = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}
    config: PreTrainedConfig = transformers.CONFIG_MAPPING[model_type](**ids, **settings[model_type])
    config.architectures = [CONFIGS[model_type]]
    return config
