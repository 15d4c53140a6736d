"""Tiny models whose layers mix tokens with state spaces, delta nets and convolutions, in any number of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.models import PAD, VOCAB

STATE = 6
HIDDEN = 72
"""Hidden size, and the features of all heads."""


@dataclass(frozen=True)
class Mixing:
    """How to make a model of one type."""

    kind: str
    """Its classes in transformers, without "Config" and "ForCausalLM"."""
    settings: Callable[[int, int], dict[str, Any]]
    """(heads, groups) -> arguments of the config."""

    def make(self, heads: int, groups: int) -> Any:
        """A random model in fp64, no two parameters of which are alike."""
        kind = getattr(transformers, f"{self.kind}Config")
        shared = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "max_position_embeddings": 64,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        }
        known = {*kind().to_dict(), *kind.attribute_map}
        config = kind(**{name: value for name, value in shared.items() if name in known} | self.settings(heads, groups))
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.kind}ForCausalLM")(config).eval().double()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.ndim == 1 or name.endswith("A_log"):
                    param.add_(torch.randn_like(param) * 0.2)
                elif param.std() < 0.1:
                    param.normal_(std=0.3)
        return model


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
}


def states(cache: Any) -> list[Tensor]:
    """The tensors that a cache keeps of the mixers' layers."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            kept = getattr(layer, name, None)
            kept = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept]
            found += [state for state in kept if isinstance(state, Tensor)]
    return found
