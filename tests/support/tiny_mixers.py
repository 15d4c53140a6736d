"""Tiny models whose layers mix tokens with state spaces, delta nets and convolutions, in any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.sizes import IDS, Type, randomize, sized

STATE = 6
HIDDEN = 72
"""Hidden size, and the features of all heads."""
COUNTS = {"layers": 2, "heads": 6, "kv_heads": 3, "head_dim": 12, "length": 64}
SIZES = {**IDS, **COUNTS, "width": HIDDEN, "inner": 20, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Mixing(Type):
    """How to make a model of one type."""

    settings: Callable[[int, int], dict[str, Any]]
    """(heads, groups) -> arguments of the config beside SIZES."""

    def make(self, heads: int, groups: int) -> Any:
        """A random model in fp64, no two parameters of which are alike."""
        kind = getattr(transformers, self.config)
        config = kind(**sized(kind, SIZES, self.settings(heads, groups)))
        torch.manual_seed(0)
        return randomize(getattr(transformers, self.model)(config).double(), moved=("A_log",), std=0.3)


def state_space(prefix: str = "mamba_", **changes: Any) -> Callable[[int, int], dict[str, Any]]:
    """Settings of Mamba-2 mixers, by the names that hybrids give them."""
    return lambda heads, groups: {
        f"{prefix}n_heads": heads,
        f"{prefix}n_groups": groups,
        f"{prefix}d_head": HIDDEN // heads,
        f"{prefix}d_state": STATE,
        f"{prefix}chunk_size": 4,
        f"{prefix}expand": 1,
        **changes,
    }


def delta_net(**changes: Any) -> Callable[[int, int], dict[str, Any]]:
    """Settings of gated delta nets."""
    return lambda heads, groups: {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": groups,
        "linear_value_head_dim": HIDDEN // heads,
        "linear_key_head_dim": STATE,
        **changes,
    }


MIXERS: dict[str, Mixing] = {
    "falcon_h1": Mixing(
        "FalconH1",
        lambda heads, groups: {
            **state_space(mamba_rms_norm=True, mamba_norm_before_gate=False)(heads, groups),
            "mamba_d_ssm": HIDDEN,
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
        },
    ),
    "falcon_h1, norm first": Mixing(
        "FalconH1",
        lambda heads, groups: {
            **state_space(mamba_rms_norm=True, mamba_norm_before_gate=True, projectors_bias=True)(heads, groups),
            "mamba_d_ssm": HIDDEN,
        },
    ),
    "falcon_h1, no norm": Mixing(
        "FalconH1",
        lambda heads, groups: {
            **state_space(mamba_rms_norm=False, mamba_proj_bias=True)(heads, groups),
            "mamba_d_ssm": HIDDEN,
        },
    ),
    "bamba": Mixing("Bamba", state_space(attn_layer_indices=[1])),
    "mamba2": Mixing(
        "Mamba2",
        lambda heads, groups: {
            "num_heads": heads,
            "n_groups": groups,
            "head_dim": HIDDEN // heads,
            "state_size": STATE,
            "chunk_size": 4,
            "expand": 1,
        },
    ),
    "granitemoehybrid": Mixing(
        "GraniteMoeHybrid", state_space(layer_types=["mamba", "attention"], num_local_experts=0)
    ),
    "nemotron_h": Mixing(
        "NemotronH",
        lambda heads, groups: {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "mamba_num_heads": heads,
            "n_groups": groups,
            "mamba_head_dim": HIDDEN // heads,
            "ssm_state_size": STATE,
            "chunk_size": 4,
            "use_bias": True,
        },
    ),
    "zamba2": Mixing(
        "Zamba2",
        lambda heads, groups: {
            "layer_types": ["mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1],
            "num_hidden_layers": 3,
            "n_mamba_heads": heads,
            "mamba_ngroups": groups,
            "mamba_headdim": HIDDEN // heads,
            "mamba_d_state": STATE,
            "mamba_expand": 1,
            "chunk_size": 4,
            "adapter_rank": 4,
        },
    ),
    "qwen3_next": Mixing("Qwen3Next", delta_net(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)),
    "qwen3_5_text": Mixing("Qwen3_5Text", delta_net()),
    "olmo_hybrid": Mixing("OlmoHybrid", delta_net()),
    "kimi_linear": Mixing(
        "KimiLinear",
        lambda heads, _: {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "linear_num_heads": heads,
            "linear_head_dim": HIDDEN // heads,
            "num_key_value_heads": 6,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "mamba": Mixing("Mamba", lambda heads, _: {"state_size": STATE, "expand": 1, "time_step_rank": heads}),
    "falcon_mamba": Mixing("FalconMamba", lambda heads, _: {"state_size": STATE, "expand": 1, "time_step_rank": heads}),
    "jamba": Mixing(
        "Jamba",
        lambda heads, _: {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_dt_rank": heads,
            "mamba_d_state": STATE,
            "mamba_expand": 1,
        },
    ),
    "lfm2": Mixing("Lfm2", lambda *_: {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "recurrent_gemma": Mixing(
        "RecurrentGemma",
        lambda heads, groups: {
            "block_types": ["recurrent", "attention"],
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "hidden_size": 8 * heads,
            "head_dim": 8,
            "lru_width": 16 * heads,
            "intermediate_size": 44,
        },
    ),
    "zamba": Mixing(
        "Zamba",
        lambda heads, _: {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
            "n_mamba_heads": heads,
            "mamba_d_state": STATE,
            "mamba_expand": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "rwkv": Mixing("Rwkv", lambda *_: {"rescale_every": 1}),
    "xlstm": Mixing(
        "xLSTM",
        lambda heads, _: {"hidden_size": 64 * heads, "num_heads": heads, "qk_dim_factor": 1.0, "use_bias": True},
    ),
    "minimax": Mixing(
        "MiniMax",
        lambda heads, groups: {
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "block_size": 3,
            "num_local_experts": 4,
        },
    ),
}


def states(model: Any, output: Any, cache: Any) -> list[Tensor]:
    """The tensors that an output, a cache, or modules of a model, keep of the mixers' layers."""
    found: list[Any] = [*getattr(cache, "linear_cache", ()), *(output.get("state") or ())[2:]]
    found += [state for layer in getattr(output.get("cache_params"), "rnn_state", {}).values() for state in layer]
    for layer in (*getattr(cache, "layers", ()), *model.modules()):
        for name in ("conv_states", "conv1d_state", "recurrent_states"):
            kept = getattr(layer, name, None)
            found += kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept]
    return [state for state in found if isinstance(state, Tensor)]
