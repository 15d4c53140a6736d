"""Tensor-parallel experts, with parameters (experts, out, in); the router is replicated.

Each expert is sharded, by `packed_colwise` and `rowwise` on the parameters, so a rank's output is a partial sum;
`moe_tp_experts` on the experts, or `gather` on the enclosing block, adds it up.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..ranks.collectives import copy_to_region, reduce_from_region
from .base import TensorParallelLayer
from .forward.attach import LocalConfig, parameter_of
from .local import to_local
from .shards.shard import SHARD, ParamShard
from .signature import PARTIAL, REPLICATED, Signature

BATCHED = "batched_mm"
"""Implementation of transformers' experts with one product for each row."""


class ExpertsParallel(TensorParallelLayer):
    """Base of strategies of experts, which compute with this rank's shard of each expert, or with complete experts."""

    is_empty = False
    """True if each expert is sharded over more ranks than it has blocks, and this rank holds no features."""

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        self.is_empty = any(0 in shard.local_shape for shard in shards.values())

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Batched matmuls if this rank has no features for grouped ones.

        Not eager experts: they query which experts have tokens, which waits for the device and breaks a compiled graph.
        """
        if self.is_empty and hasattr(module, "config"):
            return {"config": LocalConfig(module.config, _experts_implementation=BATCHED)}
        return {}


class MoEExpertsParallel(ExpertsParallel):
    """Communication around experts with rules for their parameters.

    Copy hidden states and routing weights (backward: all-reduce), sum the output (all-reduce).
    """

    signature = Signature(REPLICATED, REPLICATED, inside=(REPLICATED, PARTIAL))

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """None: the parameters have rules of their own."""
        return None

    read: Mapping[str, ParamShard] = {}
    """Shards of the experts' matrices that a child holds, as in DBRX, by their names in the module."""

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        shards = {name: SHARD.find(param) for name, param in module.named_parameters() if "." in name}
        read = {name: shard for name, shard in shards.items() if shard is not None and shard.layout is not None}
        self.read = read if is_routed(module) else {}

    def local_parameters(self, module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Tensor | None]:
        read = {name: shard.view(parameter_of(module, name)) for name, shard in self.read.items()}
        return {**super().local_parameters(module, views), **read}

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        # Routing is identical on all ranks, but gradients of hidden states and routing weights are partial sums.
        local, group = to_local(inputs), mesh.get_group()
        copied = tuple(copy_to_region(value, group) if isinstance(value, Tensor) else value for value in local)
        return super().before(module, copied, mesh)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return reduce_from_region(super().after(module, outputs, mesh), mesh.get_group())


def is_routed(module: nn.Module) -> bool:
    """True if the experts are called with ids and weights rather than with tokens sorted by expert."""
    return len(inspect.signature(type(module).forward).parameters) > 2
