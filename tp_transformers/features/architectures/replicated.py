"""Modules that every rank computes in full, with outputs that this rank's heads use, or that the ranks sum."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import copy_to_region
from ...strategies.base import TensorParallelLayer
from ...strategies.replicate import ReplicateParallel
from ...strategies.signature import LOCAL, REPLICATED, Signature


class InnerReplicateParallel(ReplicateParallel):
    """`replicate` for an output that each rank uses for its own heads or features, such as trained rotary positions.

    The gradient of the output is summed (backward: all-reduce).

        x ── A ── xA ──f──
    """

    signature = Signature(REPLICATED, LOCAL)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B's output is used by this rank's heads, too."""
        return ReplicateParallel(), InnerReplicateParallel()

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return copy_to_region(super().after(module, outputs, mesh), mesh.get_group())


class ReplicateOnceParallel(ReplicateParallel):
    """Every rank holds the full parameter, but only rank 0 adds it to outputs that are summed over the ranks, such as
    the bias of a layer of experts (backward: all-reduce).

        xA + b
        xB
    """

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: not supported."""
        raise NotImplementedError

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        bound.added_once = tuple(name for name, _ in module.named_parameters(recurse=False))
        return bound


class IdentityExpertParallel(TensorParallelLayer):
    """An expert that returns its input, divided by the number of ranks because their outputs are summed."""

    def applies_to(self, module: object) -> bool:
        """See `TensorParallelLayer.applies_to`: the expert is an `nn.Identity`."""
        return True

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (inputs[0] / mesh.size(), *inputs[1:])
