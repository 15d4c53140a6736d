"""A tiny model: how to make it, and what to show it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.support.models import HEAD_DIM, PAD, VOCAB
from tests.support.tiny_inputs import HEADS, IMAGE, PATCH


@dataclass(frozen=True)
class Tiny:
    """How to make a tiny model, and what to show it."""

    config: str
    """Name of the config class in transformers."""
    model: str
    """Name of the model class, in the module of models beside that of the config."""
    inputs: Callable[[], dict[str, Tensor]]
    settings: tuple[tuple[str, Any], ...] = ()
    since: str = "5.6"
    """First release of transformers whose code takes a part of the heads; those before say that shapes do not fit."""

    generates: bool = True
    """False where the model's own `generate` wants more than the inputs."""

    @property
    def runs(self) -> bool:
        """True if the installed transformers has the model, as the plan takes it."""
        return hasattr(transformers, self.config) and Version(transformers.__version__) >= Version(self.since)

    def make(self) -> Any:
        """A random model of two layers, whose norms and biases are random too."""
        kind = getattr(transformers, self.config)
        known = {*kind().to_dict(), *kind.attribute_map}
        config = kind(
            **{name: value for name, value in SETTINGS.items() if name in known} | copy.deepcopy(dict(self.settings))
        )
        torch.manual_seed(0)
        model = model_class(self)(config).eval()
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.add_(torch.randn_like(param) * 0.2)
                elif param.std() < 0.1:
                    param.normal_(std=0.2)
        return model


WIDTHS = ("hidden_size", "d_model", "n_embd", "embedding_size")
INNER_WIDTHS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner", "dff", "d_ff")
DEPTHS = (
    "num_encoder_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
    "depth",
)
HEAD_COUNTS = (
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "num_attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_heads",
    "n_head",
)
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, HEADS * HEAD_DIM),
    **dict.fromkeys(INNER_WIDTHS, 50),
    **dict.fromkeys(DEPTHS, 2),
    **dict.fromkeys((*HEAD_COUNTS, "attention_heads", "n_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(LENGTHS, 16),
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_patches": (IMAGE // PATCH) ** 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "num_mel_bins": 12,
    "input_feat_per_channel": 12,
    "max_source_positions": 10,
}
FROM_IMAGES = (("encoder_hidden_size", 24), ("cross_attention_frequency", 1))
SIGHT = {
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "d_kv": HEAD_DIM,
}
"""Config of a model that sees, within a config."""
HEARING = {
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
}
"""Config of one that hears."""


def model_class(tiny: Tiny) -> Any:
    """The class of a tiny model."""
    module = getattr(transformers, tiny.config).__module__.replace(".configuration_", ".modeling_")
    return getattr(import_module(module), tiny.model)
