"""A tiny model: how to make it, and what to show it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.support.models import HEAD_DIM
from tests.support.sizes import IDS, Type, randomize, sized
from tests.support.tiny_inputs import HEADS, IMAGE, PATCH, tokens


@dataclass(frozen=True)
class Tiny(Type):
    """How to make a tiny model, and what to show it."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the config beside SETTINGS."""
    inputs: Callable[[], dict[str, Tensor]] = tokens
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
        config = kind(**sized(kind, SETTINGS, copy.deepcopy(dict(self.settings))))
        torch.manual_seed(0)
        return randomize(model_class(self)(config))


WIDTH = HEADS * HEAD_DIM
SETTINGS: dict[str, Any] = {
    **IDS,
    "eos_token_id": 2,
    "width": WIDTH,
    "inner": 50,
    "layers": 2,
    "heads": HEADS,
    "kv_heads": HEADS,
    "length": 16,
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
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
FROM_IMAGES = {"encoder_hidden_size": 24, "cross_attention_frequency": 1}
SIGHT = {
    "hidden_size": WIDTH,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "d_kv": HEAD_DIM,
}
"""Config of a model that sees, within a config."""


def model_class(tiny: Tiny) -> Any:
    """The class of a tiny model, of the module beside that of its config."""
    module = getattr(transformers, tiny.config).__module__.replace(".configuration_", ".modeling_")
    return getattr(import_module(module), tiny.model)
