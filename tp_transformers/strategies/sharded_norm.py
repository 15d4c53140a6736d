"""RMS norms over features that are cut over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..anatomy.norms import epsilon, is_rms_norm
from ..ranks.collectives import copy_to_region, reduce_from_region
from .attach import forward_of
from .base import TensorParallelLayer
from .linear import LAST


class ShardedNormParallel(TensorParallelLayer):
    """An RMS norm over features that are cut over the ranks, such as OLMo 2's over all query heads.

    `weight: (features/size)`. The mean square is that of the whole width (one all-reduce of a number a token; backward:
    all-reduce); features that several ranks hold (replicated KV heads) count once. The module is given fp32 at least,
    computes with the mean square of its own features, and its output is then put right.

        [x | y] ── norm by mean(x² + y²) ── [x' | y']
    """

    takes_sharded_activations = True

    def check(self, module: nn.Module) -> None:
        """An RMS norm: with an epsilon, and without a bias or a mean."""
        if not is_rms_norm(module, self.shape):
            raise ValueError(f"a {type(module).__name__} is no RMS norm, whose mean square could be summed")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The features."""
        return -1

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The shape that torch's RMSNorm norms over."""
        layout = self.layout("weight", self.shape, self.size)
        if not isinstance(module, nn.RMSNorm) or layout is None:
            return {}
        return {"normalized_shape": layout.local_shape(self.shape, rank)}

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, group = inputs[0], mesh.get_group()
        layout = self.layout("weight", self.shape, self.size)
        assert layout is not None
        shared = layout.split.shared(mesh.get_local_rank())
        holders = len(shared[0].ranks) if shared else 1
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(LAST, keepdim=True)
        total = copy_to_region(reduce_from_region(squares / holders, group), group)
        eps = epsilon(module) or 0.0
        scale = torch.sqrt((squares / x.shape[LAST] + eps) / (total / layout.split.length + eps))
        forward_of(module).notes["norm"] = (scale, x.dtype)
        return (wide, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        scale, dtype = forward_of(module).notes["norm"]
        return (outputs * scale).to(dtype)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        assert isinstance(bound, ShardedNormParallel)
        bound.shape = next((tuple(param.shape) for param in module.parameters(recurse=False)), ())
        return bound

    shape: tuple[int, ...] = ()
    """Shape of the whole weight; () where there is none."""
