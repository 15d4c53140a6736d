"""Products that have the bits of one process: every element of a result is computed by one rank, in one product.

A matrix product on a CPU computes a block of columns with the bits that these columns have in the full product. So no
sum is split over ranks: a rank computes some columns of a forward, and some columns of an input's gradient.

    forward     x ──────────── [A | B] ── [xA | xB]
    backward    [a | b] ─ gather ─ ab ── [A' / B'] ─ all-to-all ─ columns of W ── gather ── gradient of x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ranks.collectives import Group, all_gather_uneven, apply_directly, exchange_regions, gather_from_region
from ...slices.layout import Ranks, Split, apportion, count_of

BLOCK = 64
"""Columns of a block: a product of fewer columns, or of columns that begin elsewhere, may use another kernel."""
LAST = -1


def block_of(length: int, ranks: Ranks) -> int:
    """The largest block, a power of 2 of at most BLOCK, of which every rank gets one."""
    block = BLOCK
    while block > 1 and length < block * count_of(ranks):
        block //= 2
    return block


def gather_features(x: Tensor, split: Split, group: Group, *, dim: int = LAST) -> Tensor:
    """All-gather the shards of `dim`, in the order of the unsharded dim; backward keeps this rank's shard."""
    return in_order(gather_from_region(x, split.widths, group, dim=dim), split, dim)


def in_order(gathered: Tensor, split: Split, dim: int) -> Tensor:
    """Bring `gathered`, the concatenated shards of all ranks along `dim`, into the order of the unsharded dim."""
    starts = [sum(split.widths[:rank]) for rank in range(split.size)]
    places = [(starts[place.rank] + place.local, place.length) for place in split.shard_ranges]
    if all(start == sum(length for _, length in places[:index]) for index, (start, _) in enumerate(places)):
        return gathered.narrow(dim, 0, split.length)
    return torch.cat([gathered.narrow(dim, start, length) for start, length in places], dim)


def with_input_gradient(
    y: Tensor, x: Tensor, weight: Tensor, split: Split, ranks: Ranks, group: Group, *, is_transposed: bool
) -> Tensor:
    """Return `y`; its backward computes the gradient of `x`, of which `y` was computed without recording it.

    Args:
        y: (..., features of this rank).
        x: (..., in), replicated.
        weight: this rank's features, (out/size, in), or (in, out/size) if it is transposed.
        split: of the output features.
        ranks: the number of ranks, or their shares.
    """
    output: Tensor = apply_directly(_InputGradient)(y, x, weight, split, ranks, group, is_transposed)
    return output


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, weight: Tensor, split: Split, ranks: Ranks, group: Group, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.dtype, ctx.settings = x.shape, x.dtype, (split, ranks, group, is_transposed)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (split, ranks, group, is_transposed) = ctx.saved_tensors, ctx.settings
        rows = grad.reshape(-1, grad.shape[LAST])
        full = in_order(all_gather_uneven(rows, split.widths, group), split, LAST).contiguous()
        length, out = ctx.shape[LAST], 1 if is_transposed else 0
        columns = apportion(length, ranks, unit=block_of(length, ranks)).widths
        weight = exchange_regions(weight.to(grad.dtype), split.widths, columns, group, dim=out, into=1 - out)
        weight = in_order(weight, split, out).contiguous()
        own = full @ (weight.t() if is_transposed else weight)
        gradient = all_gather_uneven(own, columns, group).view(ctx.shape).to(ctx.dtype)
        return grad, gradient, None, None, None, None, None
