"""Products that have the bits of one process: every element of a result is computed by one rank, in one product.

A matrix product on a CPU computes a block of columns with the bits that these columns have in the full product. So no
sum is split over ranks: a rank computes some columns of a forward, and some columns of an input's gradient.

    forward     x ──────────── [A | B] ── [xA | xB]
    backward    [a | b] ─ gather ─ ab ── [A' / B'] ─ all-to-all ─ columns of W ── gather ── gradient of x
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import Group, all_gather_uneven, apply_directly, exchange_regions, gather_from_region
from ...slices.layout import Ranks, Split
from ...strategies.base import TensorParallelLayer

BLOCK = 64
"""Columns of a block: a product of fewer columns, or of columns that begin elsewhere, may use another kernel. So what
remains of a length belongs to the last block."""
LAST = -1


class InBlocks(TensorParallelLayer):
    """Base of strategies that split features in blocks of columns, and keep the order of one process."""

    keeps_order = True

    def gathered(self) -> Iterable[Split]:
        """Splits of what a forward or backward gathers."""
        return ()

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Compute the order of gathered shards, which torch.compile cannot: cached properties take a lock."""
        for split in self.gathered():
            split.gathered_ranges  # noqa: B018

    def split_part(self, length: int, ranks: Ranks, unit: int = 1) -> Split:
        """See `TensorParallelLayer.split_part`: in blocks of columns, of the largest size that gives every rank one."""
        block = BLOCK
        while block > 1 and length < block * ranks.size:
            block //= 2
        return ranks.split(length, unit=max(unit, block), joins=True)


def gather_features(x: Tensor, split: Split, group: Group) -> Tensor:
    """All-gather the shards of the features, in the unsharded order; backward keeps this rank's shard."""
    gathered = in_order(gather_from_region(x, split.widths, group), split, LAST)
    if torch.compiler.is_dynamo_compiling() and gathered.requires_grad:
        return apply_directly(_StoreGradient)(gathered)  # type: ignore[no-any-return]
    return gathered


def in_order(gathered: Tensor, split: Split, dim: int) -> Tensor:
    """Bring `gathered`, the concatenated shards of all ranks along `dim`, into the order of the unsharded dim."""
    ranges = [gathered.narrow(dim, start, stop - start) for start, stop in split.gathered_ranges]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim)


@torch.library.custom_op("tp_transformers::stored", mutates_args=())  # type: ignore[untyped-decorator]
def _stored(x: Tensor) -> Tensor:
    """A copy. torch.compile cannot look into it, so it computes all of `x`, by the kernels of one process."""
    return x.clone(memory_format=torch.contiguous_format)


@_stored.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _StoreGradient(torch.autograd.Function):
    """The input; its gradient is computed as a whole before a shard of it is kept.

    Kernels of a shard alone may take other functions: Inductor's sine of 16 numbers is not that of one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        stored: Tensor = _stored(grads[0])
        return stored


class InputGradient(torch.autograd.Function):
    """`y`, which was computed from `x` without recording it; the backward computes the gradient of `x`, too.

    y: (..., features of this rank); x: (..., in), replicated. `weight`: this rank's features, (out/size, in), or
    (in, out/size) if it is transposed. `split`: of the output features. `columns`: of the input features; each rank
    computes the gradient of some.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor, split: Split, columns: Split, group: Group, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype, ctx.settings = x.shape, x.dtype, (split, columns, group, is_transposed)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (split, columns, group, is_transposed) = ctx.saved_tensors, ctx.settings
        rows = grad.flatten(0, -2)
        full = in_order(all_gather_uneven(rows, split.widths, group), split, LAST).contiguous()
        out = 1 if is_transposed else 0
        weight = exchange_regions(weight.to(grad.dtype), split.widths, columns.widths, group, dim=out, into=1 - out)
        weight = in_order(weight, split, out).contiguous()
        own = full @ (weight.t() if is_transposed else weight)
        gradient = all_gather_uneven(own, columns.widths, group).view(ctx.shape).to(ctx.dtype)
        return grad, gradient, None, None, None, None, None
