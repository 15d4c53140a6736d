"""Norms over sharded features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...anatomy import epsilon, is_norm, is_rms_norm
from ...ranks.collectives import copy_to_region, reduce_from_region
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of, parameter_of
from ...strategies.linear import LAST
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import LOCAL, Signature


class ShardedNormParallel(TensorParallelLayer):
    """An RMS norm over sharded features, such as OLMo 2's over all query heads, a LayerNorm, or an L2 norm.

    `weight: (features/size)`. The mean square is over the full width (one all-reduce of a number per token; backward:
    all-reduce), and so is a LayerNorm's mean before it; features that several ranks hold (replicated KV heads) count
    once. An RMS norm gets fp32 at least and computes with the mean square of its own features; its output is then
    rescaled. A LayerNorm's output is computed here. An L2 norm has no weight, and the sum in place of the mean.

        [x | y] ── norm by mean(x² + y²) ── [x' | y']
    """

    signature = Signature(LOCAL, LOCAL)

    def check(self, module: nn.Module) -> None:
        """Accept a LayerNorm or an RMS norm with a weight, or an L2 norm without one."""
        is_layer_norm = isinstance(module, nn.LayerNorm) and len(self.shape) == 1
        if not (is_rms_norm(module, self.shape) or is_layer_norm or is_l2_norm(module)):
            raise ValueError(f"a {type(module).__name__} is no norm whose mean square could be summed")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The features."""
        return -1

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The `normalized_shape` of torch's norms."""
        if not isinstance(module, nn.RMSNorm | nn.LayerNorm):
            return {}
        layout = self.layout("weight", self.shape, self.size)
        assert layout is not None
        return {"normalized_shape": layout.local_shape(self.shape, rank)}

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Keep the shards of weight and bias for a LayerNorm's output."""
        self.shards = shards

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, group = inputs[0], mesh.get_group()
        layout = self.layout("weight", self.shape, self.size) if self.shape else None
        split, count = (layout.split, layout.split.length) if layout is not None else (self.split, 1)
        shared = split.shared(self.rank) if split is not None else ()
        count *= len(shared[0].ranks) if shared else 1

        def mean(values: Tensor) -> Tensor:  # over the full width; of an L2 norm the sum
            return copy_to_region(reduce_from_region(values.sum(LAST, keepdim=True) / count, group), group)

        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(module, nn.LayerNorm):
            wide = wide - mean(wide)
        forward_of(module).notes["norm"] = (wide, mean(wide.square()), x.dtype)
        return (wide, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        wide, mean_square, dtype = forward_of(module).notes["norm"]
        eps = epsilon(module) or 0.0
        if not isinstance(module, nn.LayerNorm):
            own = wide.square().sum(LAST, keepdim=True) / (wide.shape[LAST] if self.shape else 1)
            return (outputs * torch.sqrt((own + eps) / (mean_square + eps))).to(dtype)
        local = {name: shard.view(parameter_of(module, name)) for name, shard in self.shards.items()}
        normed = wide * torch.rsqrt(mean_square + eps) * local["weight"]
        return (normed + local["bias"] if "bias" in local else normed).to(dtype)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        assert isinstance(bound, ShardedNormParallel)
        bound.shape = next((tuple(param.shape) for param in module.parameters(recurse=False)), ())
        return bound

    shape: tuple[int, ...] = ()
    """Shape of the unsharded weight; () without one."""


def is_l2_norm(module: nn.Module) -> bool:
    """True if a module without parameters divides vectors by their length: it has an epsilon, and halves four ones."""
    if not is_norm(module) or epsilon(module) is None or list(module.parameters()):
        return False
    return bool(torch.allclose(module(torch.ones(4, device="cpu")), torch.full((4,), 0.5, device="cpu"), rtol=1e-4))
