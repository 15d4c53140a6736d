"""Blocks that compute without communication inside, and the all-reduce of their output.

A block of `local_*` modules computes a partial sum of its output on every rank without communication; `gather` on the
block copies its input (backward: all-reduce) and sums its output (all-reduce), once for all modules inside.

    x ──f── [ local_colwise ── local_rowwise ] ── partial ──g── full
            └─────────────── gather ────────────────────┘
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..ranks.collectives import copy_to_region, reduce_from_region
from .base import TensorParallelLayer
from .forward.communication import ShortForward
from .linear import ColwiseParallel, RowwiseParallel
from .replicate import ReplicateSumGradParallel
from .signature import FEATURES, PARTIAL, REPLICATED, Signature


def to_local(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs with this rank's tensors in place of DTensors."""
    return tuple(value.to_local() if isinstance(value, DTensor) else value for value in inputs)


class _LocalMixin(TensorParallelLayer):
    """The sharding of another strategy without its communication; parameters are plain tensors."""

    heeds: tuple[str, ...] = ("use_dtensor",)

    def check(self, module: nn.Module) -> None:
        """Accept any module with parameters along the sharded features, such as a norm over heads."""

    def short_forward(self) -> ShortForward | None:
        is_inherited = (type(self).before, type(self).after) == (_LocalMixin.before, _LocalMixin.after)
        return ShortForward("as it is", "as it is") if self.is_built_in and is_inherited else None

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return to_local(inputs)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs


class LocalColwiseParallel(_LocalMixin, ColwiseParallel):
    """Shard the output features, without communication: `x ── [A | B] ── [xA | xB]`."""

    signature = Signature(REPLICATED, FEATURES)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B computes this rank's features, so A's gradient is summed."""
        return ReplicateSumGradParallel(), LocalColwiseParallel()


class LocalRowwiseParallel(_LocalMixin, RowwiseParallel):
    """Shard the input features; the output is a partial sum: `[x | y] ── [A / B] ── xA, yB`.

    Only rank 0 adds the bias.
    """

    signature = Signature(FEATURES, PARTIAL)
    hidden: tuple[str, ...] = ()
    added_once: tuple[str, ...] = ("bias",)

    def check(self, module: nn.Module) -> None:
        """Reject an embedding: one that is sharded by rows has to communicate."""
        if self.is_embedding:
            raise ValueError("the rows of an embedding are looked up on all ranks and summed; use embedding_rowwise")

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B takes partial sums, and only rank 0 adds its bias."""
        of_b = ReplicateSumGradParallel()
        of_b.added_once = ("bias",)
        return LocalRowwiseParallel(), of_b


class LocalPackedColwiseParallel(LocalColwiseParallel):
    """Shard each part of the output features, without communication."""

    parts = 2


class LocalPackedRowwiseParallel(LocalRowwiseParallel):
    """Shard each part of the input features; the output is a partial sum."""

    parts = 2


class AllReduceParallel(TensorParallelLayer):
    """Sum the module's output, or the first of several outputs, over the ranks (all-reduce; backward: identity)."""

    signature = Signature(inside=(REPLICATED, PARTIAL))

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if isinstance(outputs, Tensor):
            return reduce_from_region(outputs, mesh.get_group())
        return (reduce_from_region(outputs[0], mesh.get_group()), *outputs[1:])


class GatherParallel(AllReduceParallel):
    """Around a block that computes locally: copy the input (backward: all-reduce), sum the output (all-reduce)."""

    signature = Signature(REPLICATED, REPLICATED, inside=(REPLICATED, PARTIAL))

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first, *rest = to_local(inputs)
        return (copy_to_region(first, mesh.get_group()), *rest)
