"""What attention needs beside its projections: norms across heads, biases a head, latents that all heads share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..anatomy.norms import epsilon, is_rms_norm
from ..marks import untyped
from ..ranks.collectives import copy_to_region, reduce_from_region
from .attach import forward_of
from .base import Placements, TensorParallelLayer
from .linear import LAST


class ShardedNormParallel(TensorParallelLayer):
    """An RMS norm over features that are cut over the ranks, such as OLMo 2's over all query heads.

    `weight: (features/size)`. The mean square is that of the whole width (one all-reduce of a number a token; backward:
    all-reduce); features that several ranks hold (replicated KV heads) count once. The module is given fp32 at least,
    computes with the mean square of its own features, and its output is then put right.

        [x | y] ── norm by mean(x² + y²) ── [x' | y']
    """

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

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, strategy, group = inputs[0], mod.tp_strategy, device_mesh.get_group()
        assert isinstance(strategy, ShardedNormParallel)
        layout = strategy.layout("weight", strategy.shape, strategy.size)
        assert layout is not None
        shared = layout.split.shared(device_mesh.get_local_rank())
        holders = len(shared[0].ranks) if shared else 1
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(LAST, keepdim=True)
        total = copy_to_region(reduce_from_region(squares / holders, group), group)
        eps = epsilon(mod) or 0.0
        scale = torch.sqrt((squares / x.shape[LAST] + eps) / (total / layout.split.length + eps))
        forward_of(mod).notes["norm"] = (scale, x.dtype)
        return (wide, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        scale, dtype = forward_of(mod).notes["norm"]
        return (outputs * scale).to(dtype)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`."""
        bound = super().bind(module, size, **options)
        assert isinstance(bound, ShardedNormParallel)
        bound.shape = next((tuple(param.shape) for param in module.parameters(recurse=False)), ())
        return bound

    shape: tuple[int, ...] = ()
    """Shape of the whole weight; () where there is none."""


class MlaKvAProjParallel(TensorParallelLayer):
    """The projection of multi-head latent attention to (latent, rotary key), whole on every rank.

    The latent goes on to a column-parallel layer, which sums its gradient; the rotary key goes to this rank's heads
    directly, so its gradient is summed here (backward: all-reduce).
    """

    def check(self, module: nn.Module) -> None:
        """The config says how wide the rotary key is."""
        if not isinstance(getattr(self.config, "qk_rope_head_dim", None), int):
            raise ValueError(
                f"the config has no qk_rope_head_dim, the width of the rotary key that {self.name} ends with"
            )

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if not torch.is_grad_enabled():
            return outputs
        rope = untyped(mod).tp_strategy.config.qk_rope_head_dim
        latent, key = outputs.split([outputs.shape[LAST] - rope, rope], LAST)
        return torch.cat([latent, copy_to_region(key, device_mesh.get_group())], LAST)


class AlibiParallel(TensorParallelLayer):
    """Attention that is given biases of all heads (ALiBi): each rank takes those of its own.

    The keyword arguments `alibi` and `position_bias`, (batch * heads, 1, keys) or (batch, heads, 1, keys), and
    `attention_mask`, (batch, heads, queries, keys) where biases are in it already, are cut. MPT's have no batch.
    """

    def check(self, module: nn.Module) -> None:
        """Attention that calls its output projection, rather than slice its weight."""
        if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
            raise ValueError("slow_but_exact multiplies by slices of the whole weight; set it to False in the config")

    def prepare_keywords(self, keywords: dict[str, Any], rank: int) -> dict[str, Any]:
        """The biases and `attention_mask` of this rank's heads."""
        if self.split is None:
            return keywords
        (start, stop), heads = self.split.ranges[rank][0], self.split.length
        mask = keywords.get("attention_mask")
        local = {}
        for name in ("alibi", "position_bias"):
            biases = keywords.get(name)
            if biases is not None and biases.ndim == 3:
                local[name] = biases.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)
            elif biases is not None:
                local[name] = biases[:, start:stop]
        if mask is not None and mask.ndim == 4 and mask.shape[1] == heads:
            local["attention_mask"] = mask[:, start:stop]
        return {**keywords, **local}
