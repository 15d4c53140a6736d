"""Collectives with the backward that tensor parallelism needs, also of uneven shards.

The pairs of Megatron-LM (Shoeybi et al. 2019, "f" and "g" in its figure 3; Korthikanti et al. 2022 where the sequence
is cut): each function's backward is the other collective of its pair. README.md has a table of them.

Backwards apply the other function of the pair, so that gradients of gradients are exact, too: where autograd records a
backward (`create_graph=True`), it records the collectives in it with their own backwards.

Sharded dims need not divide: `widths` gives the length of every rank's slice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..slices.layout import Shared
from . import direct

Group = dist.ProcessGroup
Cut = tuple[int, tuple[int, ...]]
"""(dim, length of every rank's slice along it)."""
Counts = Sequence[int]
"""A number of rows for every rank."""
Place = tuple[int, int, int]
"""(start in this rank's shard, start in the buffer that all ranks sum, length)."""


def copy_to_region(x: Tensor, group: Group, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Identity; backward sums the gradients of all ranks of `group` (all-reduce), in `reduce_dtype` or in their own."""
    return _apply(_CopyToRegion, x, group, reduce_dtype) if torch.is_grad_enabled() and x.requires_grad else x


def reduce_from_region(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Sum over the ranks of `group` (all-reduce); backward is the identity.

    `in_place`: nobody else reads `x`, the backward that is recorded included, so that its memory may take the sum.
    """
    records = torch.is_grad_enabled() and x.requires_grad
    # A dispatch mode may keep `x`: selective activation checkpointing gives it to the recomputation, which sums again.
    is_kept = records and (torch.compiler.is_dynamo_compiling() or direct.is_watched())
    if in_place and x.is_contiguous() and not is_kept:
        if not records:
            direct.all_reduce(x, group)
            return x
        direct.all_reduce(x.detach(), group)
        # For gradients of gradients. As Tensor.register_hook, without a handle.
        x._backward_hooks = OrderedDict(reduced=partial(copy_to_region, group=group))
        x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]
        return x
    if not records:
        total = x.clone(memory_format=torch.contiguous_format)
        direct.all_reduce(total, group)
        return total
    return _apply(_ReduceFromRegion, x, group, None)


def gather_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Join the slices of all ranks along `dim` (all-gather); backward keeps this rank's slice of the gradient.

    `widths[rank]` is the length of that rank's slice; `x` has length `widths[own rank]` along `dim`.
    """
    if not torch.is_grad_enabled():
        return all_gather_uneven(x, widths, group, dim=dim)
    return _apply(_GatherFromRegion, x, tuple(widths), group, dim)


def scatter_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """This rank's slice of `x` along `dim`; backward joins the gradients of all ranks (all-gather)."""
    return _apply(_ScatterToRegion, x, tuple(widths), group, dim)


def gather_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Join the slices of all ranks along `dim` (all-gather); backward sums the gradients of all ranks, and keeps this
    rank's slice (reduce-scatter).
    """
    return _apply(_GatherToRegion, x, tuple(widths), group, dim)


def reduce_scatter_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks (reduce-scatter); backward joins the gradients of all
    ranks (all-gather).
    """
    return _apply(_ReduceScatterFromRegion, x, tuple(widths), group, dim)


def exchange_regions(
    x: Tensor, widths: Sequence[int], parts: Sequence[int], group: Group, *, dim: int = -1, into: int = 0
) -> Tensor:
    """This rank's slice along `into` of the whole, joined along `dim` (all-to-all); backward is the reverse all-to-all.

    `widths[rank]` is the length of that rank's `x` along `dim`, `parts[rank]` that of its result along `into`.
    """
    return _apply(_Exchange, x, (dim % x.ndim, tuple(widths)), (into % x.ndim, tuple(parts)), group)


def copy_shared(
    x: Tensor,
    shared: Sequence[Shared],
    length: int,
    group: Group,
    reduce_dtype: torch.dtype | None = None,
    *,
    dim: int,
) -> Tensor:
    """Identity; backward sums the gradients of indices that several ranks hold over those ranks.

    It is one all-reduce over all ranks of `group`, of `length` indices along `dim`: each shared index has a slot there,
    which is zero on ranks that do not hold it. So no process group of the holders is needed.

    Args:
        shared: the indices of `x` along `dim` that other ranks hold too; empty on some ranks.
        length: number of indices that several ranks hold, the same on all ranks.
        reduce_dtype: dtype of the sum, which is then rounded to the gradient's; None for the gradient's own.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x
    places = tuple((part.local, part.slot, part.length) for part in shared)
    return _apply(_CopyShared, x, places, length, dim, group, reduce_dtype)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """The number that every rank has for this one; `counts[rank]` is that which this one has for `rank`: (size,)."""
    ones = [1] * group.size()
    return direct.all_to_all(counts, ones, ones, group)


def exchange_rows(tensors: Sequence[Tensor], sent: Counts, received: Counts, group: Group) -> tuple[Tensor, ...]:
    """Send rows of each of `tensors` to every rank, in one all-to-all; backward is the reverse all-to-all.

    Args:
        tensors: (sum of `sent`, any width) each, of any dtypes, by the rank that rows are for. Integers have no
            gradient.
        sent: rows for every rank, this one included; any may be 0.
        received: rows from every rank.
        group: the ranks; all have to call it, also those without any rows.

    Returns:
        A tensor for each: (sum of `received`, its width), by the rank that rows come from.
    """
    found: tuple[Tensor, ...] = apply_directly(_ExchangeRows)(tuple(sent), tuple(received), group, *tensors)
    return found


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity; backward multiplies the gradient by `factor`."""
    return _apply(_Scale, x, 1.0, factor) if torch.is_grad_enabled() and x.requires_grad else x


def all_gather_uneven(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather slices of different lengths along `dim`, without autograd: shorter ones travel padded."""
    dim, longest, shortest = dim % x.ndim, max(widths), min(widths)
    whole = direct.all_gather(_padded(x, longest, dim), group)
    if dim == 0 and shortest == longest:
        return whole
    pieces = whole.chunk(len(widths))
    if shortest < longest:
        pieces = tuple(piece.narrow(dim, 0, width) for piece, width in zip(pieces, widths, strict=True))
    return torch.cat(pieces, dim)


def _padded(x: Tensor, length: int, dim: int) -> Tensor:
    """`x` with zeros behind it, up to a `length` along `dim`."""
    if x.shape[dim] == length:
        return x
    padding = list(x.shape)
    padding[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(padding)], dim)


def all_gather_number(number: int, group: Group, device: torch.device | str) -> tuple[int, ...]:
    """The `number` of every rank."""
    return tuple(all_gather_uneven(torch.tensor([number], device=device), [1] * group.size(), group).tolist())


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    output: Tensor = apply_directly(function)(*args)
    return output


def apply_directly(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its support of torch.func, which takes a third of the time."""
    if torch.compiler.is_dynamo_compiling():
        return function.apply
    direct.refuse_transforms()
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_ReduceFromRegion, grads[0], ctx.group, ctx.reduce_dtype), None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        # A copy: the caller's tensor may be an activation that others still read.
        if not torch.compiler.is_dynamo_compiling() and direct.is_watched() and group.size() > 1:
            return direct.all_reduced(x.to(reduce_dtype or x.dtype), group).to(x.dtype)
        total = x.to(reduce_dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
        direct.all_reduce(total, group)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return copy_to_region(grads[0], ctx.group, ctx.reduce_dtype), None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> Tensor:
        ctx.widths, ctx.group, ctx.dim = widths, group, dim
        return all_gather_uneven(x, widths, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_ScatterToRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> Tensor:
        ctx.widths, ctx.group, ctx.dim = widths, group, dim
        rank = dist.get_rank(group)
        return x.narrow(dim, sum(widths[:rank]), widths[rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_GatherFromRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _GatherToRegion(_GatherFromRegion):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_ReduceScatterFromRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _ReduceScatterFromRegion(_ScatterToRegion):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> Tensor:
        ctx.widths, ctx.group, ctx.dim = widths, group, dim
        dim, longest = dim % x.ndim, max(widths)  # shorter slices travel padded
        parts = [_padded(part, longest, dim) for part in x.split(list(widths), dim)]
        own, width = direct.reduce_scatter(torch.cat(parts), group), widths[dist.get_rank(group)]
        return own if width == longest else own.narrow(dim, 0, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_GatherToRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, into: Cut, group: Group) -> Tensor:
        ctx.cut, ctx.into, ctx.group = cut, into, group
        (dim, widths), (other, parts), rank = cut, into, dist.get_rank(group)
        shapes = [list(x.shape) for _ in widths]
        for shape, width in zip(shapes, widths, strict=True):
            shape[dim], shape[other] = width, parts[rank]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pieces = [piece.reshape(-1) for piece in x.split(list(parts), other)]
        received = direct.all_to_all(torch.cat(pieces), [piece.numel() for piece in pieces], sizes, group)
        return torch.cat([piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_Exchange, grads[0], ctx.into, ctx.cut, ctx.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Counts, received: Counts, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.settings = (received, sent, group)
        ctx.have_gradients = [tensor.is_floating_point() for tensor in tensors]
        # As bytes, so that values of several dtypes travel together.
        rows = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        arrived = direct.all_to_all(packed, sent, received, group)
        parts = arrived.split([row.shape[1] for row in rows], 1)
        found = [part.contiguous().view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
        ctx.mark_non_differentiable(*[each for each in found if not each.is_floating_point()])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.settings
        given = [grad for grad, has in zip(grads, ctx.have_gradients, strict=True) if has]
        found = iter(exchange_rows(given, sent, received, group))
        return (None, None, None, *(next(found) if has else None for has in ctx.have_gradients))


class _CopyShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, places: tuple[Place, ...], length: int, dim: int, group: Group, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.settings = (places, length, dim, group, dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _apply(_ReduceShared, grads[0], *ctx.settings), None, None, None, None, None


class _ReduceShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, places: tuple[Place, ...], length: int, dim: int, group: Group, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.settings = (places, length, dim, group, dtype)
        total = x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
        buffer = total.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))
        for local, slot, width in places:
            buffer.narrow(dim, slot, width).copy_(x.narrow(dim, local, width))
        direct.all_reduce(buffer, group)
        for local, slot, width in places:
            total.narrow(dim, local, width).copy_(buffer.narrow(dim, slot, width))
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _apply(_CopyShared, grads[0], *ctx.settings), None, None, None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, of_gradient: float) -> Tensor:
        ctx.factors = (of_gradient, factor)
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Scale, grads[0], *ctx.factors), None, None
