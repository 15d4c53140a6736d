"""The projection of multi-head latent attention; its rotary key bypasses the column-parallel layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import copy_to_region
from ...strategies.base import TensorParallelLayer
from ...strategies.linear import LAST
from ...strategies.replicate import ReplicateParallel
from ...strategies.signature import LOCAL, REPLICATED, Signature


class MlaKvAProjParallel(TensorParallelLayer):
    """The replicated projection of multi-head latent attention to (latent, rotary key).

    A column-parallel layer takes the latent and sums its gradient. This rank's heads take the rotary key directly, so
    its gradient is summed here (backward: all-reduce).
    """

    signature = Signature(REPLICATED, LOCAL)

    def check(self, module: nn.Module) -> None:
        """The config must have the width of the rotary key."""
        if not isinstance(getattr(self.config, "qk_rope_head_dim", None), int):
            raise ValueError(
                f"the config has no qk_rope_head_dim, the width of the rotary key that {self.name} ends with"
            )

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B's output ends with a delta of the rotary key, handled the same way."""
        return ReplicateParallel(), copy.copy(self)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if not torch.is_grad_enabled():
            return outputs
        rope = self.config.qk_rope_head_dim
        latent, key = outputs.split([outputs.shape[LAST] - rope, rope], LAST)
        return torch.cat([latent, copy_to_region(key, mesh.get_group())], LAST)
