"""Parameters with something for every channel or head, which the forward of a mixer reads."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..base import TensorParallelLayer


class ChannelwiseParallel(TensorParallelLayer):
    """Cut dim 0, in plain tensors: the channels of a depthwise convolution, the output features of a linear, the heads
    of a parameter. Nothing is communicated.

        [x | y] ── [a / b] ── [ax | by]
    """

    takes_sharded_activations = True
    viewed_around = True

    def check(self, module: nn.Module) -> None:
        """A convolution computes each channel by itself."""
        if isinstance(module, _ConvNd) and not module.groups == module.in_channels == module.out_channels:
            raise ValueError(f"a {type(module).__name__} whose channels are not computed one by one")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The channels."""
        return 0

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The channels of a convolution, for code that calls it."""
        if not isinstance(module, _ConvNd):
            return {}
        return dict.fromkeys(
            ("groups", "in_channels", "out_channels"), self.cut(module.out_channels, self.size).widths[rank]
        )
