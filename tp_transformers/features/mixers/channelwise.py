"""Sharding of parameters with one entry per channel or head, which the forward of a mixer reads directly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import Conv1D

from ...anatomy import CONVOLUTIONS, features
from ...slices.layout import Layout
from ...strategies.base import TensorParallelLayer
from ...strategies.shards.shard import ParamShard
from ...strategies.shards.tensors import ShardTensor
from ...strategies.signature import LOCAL, Signature
from .counts import first_long_dim


class ChannelwiseParallel(TensorParallelLayer):
    """Shard the first dim longer than 1, in plain tensors: channels of a depthwise convolution, output features of a
    linear, heads of a parameter. No communication.

        [x | y] ── [a / b] ── [ax | by]
    """

    signature = Signature(LOCAL, LOCAL)

    def check(self, module: nn.Module) -> None:
        """Raise ValueError unless `module` is a depthwise convolution or a linear."""
        is_depthwise = isinstance(module, CONVOLUTIONS) and module.groups == module.in_channels == module.out_channels
        is_linear = features(module) is not None and not has_inputs_first(module)
        if not (is_depthwise or is_linear):
            raise ValueError(f"a {type(module).__name__} is no linear, and no convolution channel by channel")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The first dim; see `_layout`."""
        return 0

    def _layout(self, param_type: str, shape: Sequence[int], size: int) -> Layout | None:
        dim = first_long_dim(shape)
        return Layout(dim, self.split_length(shape[dim], size))

    def views_of(self, module: nn.Module, views: Mapping[str, ParamShard]) -> Iterable[str]:
        """See `Communication.views_of`; the enclosing mixer has replaced the parameters that it reads."""
        return [name for name in views if isinstance(module._parameters[name], ShardTensor)]

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Channel counts of a convolution's shard, for code that calls it."""
        if not isinstance(module, CONVOLUTIONS):
            return {}
        return dict.fromkeys(
            ("groups", "in_channels", "out_channels"), self.split_length(module.out_channels, self.size).widths[rank]
        )


def has_inputs_first(module: nn.Module) -> bool:
    """True if weight rows are input features (Conv1D, embedding, transposed experts); used for drawings."""
    return isinstance(module, nn.Embedding | Conv1D) or bool(getattr(module, "is_transposed", False))
