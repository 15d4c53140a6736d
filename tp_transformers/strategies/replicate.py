"""Replicated parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..ranks.collectives import copy_to_region
from .base import TensorParallelLayer
from .signature import LOCAL, PARTIAL, REPLICATED, Signature


class ReplicateParallel(TensorParallelLayer):
    """Every rank holds the full parameter and computes the full output from the full input; no communication.

    x ── A ── xA
    """

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: both matrices are replicated."""
        return ReplicateParallel(), ReplicateParallel()


class ReplicateSumGradParallel(ReplicateParallel):
    """Every rank holds the full parameter, but applies it to its own shard of the activations, such as a norm within
    attention heads; so the gradients are partial sums (backward: all-reduce).

        xA ── n(xA)
        xB ── n(xB)
    """

    signature = Signature(LOCAL, LOCAL, gradient=PARTIAL)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: both matrices compute on this rank's activations."""
        return ReplicateSumGradParallel(), ReplicateSumGradParallel()


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
