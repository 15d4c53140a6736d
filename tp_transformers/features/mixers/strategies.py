"""Strategies of the modules of mixers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad, silu
from transformers import Conv1D

from ...anatomy import CONVOLUTIONS, epsilon, features, is_rms_norm
from ...ranks.collectives import copy_to_region, reduce_from_region
from ...slices.layout import Layout
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ...strategies.linear import LAST, RowwiseParallel
from ...strategies.shards.shard import ParamShard
from ...strategies.shards.tensors import ShardTensor
from ...strategies.signature import FEATURES, LOCAL, Signature
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

    def local_parameters(self, module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Tensor | None]:
        """See `Communication.local_parameters`; the enclosing mixer has replaced the parameters that it reads."""
        own = {name: shard for name, shard in views.items() if isinstance(module._parameters[name], ShardTensor)}
        return super().local_parameters(module, own)

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


class GatedNormParallel(TensorParallelLayer):
    """An RMS norm over groups of features that are sharded over the ranks; a SiLU gate may come first.

    `weight: (features/size)`. Ranks that hold complete groups do not communicate. If each rank holds a shard of one
    group, the mean square of the full group takes one all-reduce of a number per token and group (backward:
    all-reduce), as in `sharded_norm`.

        [x | y] ── norm by mean(x² + y²) ── [x' | y']
    """

    signature = Signature(LOCAL, LOCAL)
    length = 0
    """Number of features of all groups."""
    group = 0
    """Number of features of one group."""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; reads the module's groups once."""
        bound = super().bind(module, size, **options)
        assert isinstance(bound, GatedNormParallel)
        bound.length = sum(param.shape[0] for param in module.parameters(recurse=False))
        attributes = vars(module)
        bound.group = attributes.get("group_size") or bound.length // (attributes.get("n_groups") or 1)
        return bound

    def check(self, module: nn.Module) -> None:
        """Raise ValueError unless `module` is an RMS norm, and a rank has complete groups or a shard of one."""
        if not is_rms_norm(module, (self.length,)):
            raise ValueError(f"a {type(module).__name__} is no norm whose mean square could be summed")
        for rank_ranges in self.split_length(self.length, self.size).ranges:
            start, stop = min(span[0] for span in rank_ranges), max(span[1] for span in rank_ranges)
            if not self.has_full_groups and start // self.group != (stop - 1) // self.group:
                raise ValueError(f"a rank would have parts of several groups of {self.group} features")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """Return the feature dim."""
        return 0

    @property
    def has_full_groups(self) -> bool:
        """True if every rank holds complete groups."""
        ranges = self.split_length(self.length, self.size).ranges
        return not any(bound % self.group for rank_ranges in ranges for span in rank_ranges for bound in span)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Number and size of the groups on this rank; a shard of a group counts as one."""
        width = self.split_length(self.length, self.size).widths[rank]
        groups = width // self.group if self.has_full_groups else 1
        local = {"n_groups": groups, "group_size": width // groups, "normalized_shape": (width // groups,)}
        return {name: value for name, value in local.items() if name in module.__dict__}

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if self.has_full_groups:
            return inputs
        x, group = inputs[0], mesh.get_group()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        gate: Tensor | None = inputs[1] if len(inputs) > 1 else None
        is_gated_first = gate is not None and not getattr(module, "norm_before_gate", False)
        normed = wide * silu(gate.to(wide.dtype)) if is_gated_first and gate is not None else wide
        squares = normed.square().sum(LAST, keepdim=True)
        index = self.split_length(self.length, self.size).ranges[self.rank][0][0] // self.group
        slots = pad(squares / self.group, (index, self.length // self.group - 1 - index))
        mean = copy_to_region(reduce_from_region(slots, group), group)[..., index : index + 1]
        forward_of(module).notes["norm"] = (squares / x.shape[LAST], mean, x.dtype)
        return (wide, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.has_full_groups:
            return outputs
        local_mean, mean, dtype = forward_of(module).notes["norm"]
        eps = epsilon(module) or 0.0
        return (outputs * torch.sqrt((local_mean + eps) / (mean + eps))).to(dtype)


class InnerRowwiseParallel(RowwiseParallel):
    """`rowwise` for an output that each rank uses for other features: its gradient is summed too (backward:
    all-reduce).

        [x | y] ── [A / B] ── xA + yB ──g──f──
    """

    signature = Signature(FEATURES, LOCAL)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return copy_to_region(super().after(module, outputs, mesh), mesh.get_group())
