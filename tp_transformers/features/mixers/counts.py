"""Mixers other than attention, such as state spaces and delta nets: head and group counts, and widths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from ...anatomy import features, first_of

HEAD_COUNTS = ("num_heads", "num_v_heads", "num_attention_heads", "n_mamba_heads")
GROUP_COUNTS = ("n_groups", "num_k_heads")
"""Numbers of groups; the heads of a group share B and C (state spaces), or query and key (delta nets)."""
VALUE_WIDTHS = ("intermediate_size", "value_dim", "qkv_dim", "lru_width", "v_dim", "attention_hidden_size")
"""Total features of all heads."""
KEY_WIDTHS = ("key_dim", "groups_time_state_size", "qk_dim")
"""Total features of all groups."""
CONVOLVED_WIDTH = "conv_dim"
"""Channels of the convolution."""


def mixer_counts(modules: Sequence[nn.Module], width: int) -> tuple[int, int]:
    """(heads, groups) of a mixer of `width` channels; without a head count, each channel is a head.

    `modules`: the mixer, and its submodules with per-head parameters.
    """
    heads = first_of(HEAD_COUNTS, *modules) or width
    return heads, first_of(GROUP_COUNTS, *modules) or heads


def counts_heads_by_config(module: nn.Module) -> bool:
    """True if the forward of a mixer reads its head count from the config."""
    if not hasattr(module, "config") or first_of(HEAD_COUNTS, module) is not None:
        return False
    return not set(HEAD_COUNTS).isdisjoint(inspect.unwrap(type(module).forward).__code__.co_names)


def first_long_dim(shape: Sequence[int]) -> int:
    """The first dim longer than 1 of a mixer's parameter: its channels or heads."""
    return next((dim for dim, length in enumerate(shape) if length > 1), 0)


def mixed_length(child: nn.Module | Tensor, *, is_output: bool) -> int:
    """Features of a child of a mixer: input features for its output projection, else output features."""
    if not isinstance(child, nn.Module):
        return child.shape[first_long_dim(child.shape)]
    widths = features(child)
    if widths is not None:
        return widths[0] if is_output else widths[1]
    return max((param.shape[0] for param in child.parameters(recurse=False)), default=0)
