"""Small configs: sizes by the names that each config class has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.models import PAD, VOCAB

NAMES: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size", "d_model", "n_embd", "embedding_size"),
    "inner": (
        *("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size"),
        *("n_inner", "dff", "d_ff"),
    ),
    "layers": (
        *("num_hidden_layers", "num_layers", "num_encoder_layers", "num_decoder_layers", "encoder_layers"),
        *("decoder_layers", "n_layer", "n_layers", "depth"),
    ),
    "heads": (
        *("num_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_head", "n_heads"),
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "length": ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"),
    "std": ("initializer_range", "init_std"),
}
"""Size -> its names in the configs of transformers."""
IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}


def sized(kind: Any, sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a config class: `sizes`, by the names that it has for them; and `changes` of sizes and others."""
    named = {name: value for size, value in {**sizes, **changes}.items() for name in NAMES.get(size, (size,))}
    known = {*kind().to_dict(), *kind.attribute_map}
    other_names = {name for name, stored in kind.attribute_map.items() if stored in named}
    return {name: value for name, value in named.items() if name in changes or name in known - other_names}


@dataclass(frozen=True)
class Type:
    """A model type, by the names of its classes in transformers."""

    kind: str
    """Name of the config class, without "Config"."""
    head: str = field(default="", kw_only=True)
    """Name of the model class, if it is not the causal language model."""

    @property
    def config(self) -> str:
        """Name of the config class."""
        return f"{self.kind}Config"

    @property
    def model(self) -> str:
        """Name of the model class."""
        return self.head or f"{self.kind.removesuffix('Text')}ForCausalLM"


def randomize(model: Any, *, moved: tuple[str, ...] = (), std: float = 0.2) -> Any:
    """Move biases, norms and parameters with a name of `moved`; give the others a standard deviation of 0.1 or more."""
    with torch.no_grad():
        for name, param in model.eval().named_parameters():
            if param.ndim == 1 or any(part in name for part in moved):
                param.add_(torch.randn_like(param) * 0.2)
            elif param.std() < 0.1:
                param.normal_(std=std)
    return model
