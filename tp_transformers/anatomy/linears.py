"""Linears, embeddings, convolutions, experts and dropouts: predicates and widths."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Conv1D

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def features(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) features of a linear or embedding (rows, features); None for any other module.

    Stacked experts, one weight (experts, out, in) for tokens sorted by expert, count as one linear.
    """
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    if "weight" in module._parameters and hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 3 and hasattr(module, "input_size") and hasattr(module, "output_size"):
        return int(module.input_size), int(module.output_size)  # type: ignore[arg-type]
    return None


def input_width(module: nn.Module) -> int:
    """Input features of a linear or an embedding; 0 for any other module."""
    return (features(module) or (0, 0))[0]


def output_width(module: nn.Module) -> int:
    """Output features of a linear or an embedding; 0 for any other module."""
    return (features(module) or (0, 0))[1]


def is_transposed(module: nn.Module) -> bool:
    """True if a linear's weight is (in, out), as in GPT-2's Conv1D: strategies shard it along the other dim."""
    return isinstance(module, Conv1D)


def embeds_states(module: nn.Module, config: Any) -> bool:
    """True for an embedding with the hidden size; norms and residual sums need all its features."""
    return isinstance(module, nn.Embedding) and module.embedding_dim == getattr(config, "hidden_size", None)


def holds_experts(module: nn.Module) -> bool:
    """True if the module's parameters are expert weights (experts, ...) and their biases."""
    shapes = [param.shape for param in module.parameters(recurse=False)]
    return (
        not isinstance(module, CONVOLUTIONS)
        and features(module) is None
        and {2, 3} >= {len(shape) for shape in shapes} >= {3}
        and len({shape[0] for shape in shapes}) == 1
        and not any(map(features, module.children()))  # else a mixer, which has heads
    )
