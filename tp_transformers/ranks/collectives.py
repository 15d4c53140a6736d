"""Differentiable collectives for tensor parallelism, also for uneven shards.

The conjugate pairs of Megatron-LM (Shoeybi et al. 2019, "f" and "g" in its figure 3; Korthikanti et al. 2022 for
sequence parallelism): the backward of each function is the other collective of its pair. README.md has a table.

Each backward calls the other autograd function of its pair, so that higher-order gradients (`create_graph=True`) are
exact too.

Sharded dims need not be divisible by the number of ranks: `widths` lists the shard length of every rank.
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
Sharding = tuple[int, tuple[int, ...]]
"""(dim, shard length of every rank along it)."""
Counts = Sequence[int]
"""Number of rows for each rank."""
Place = tuple[int, int, int]
"""(start in this rank's shard, start in the all-reduced buffer, length)."""


def copy_to_region(x: Tensor, group: Group, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Identity; backward all-reduces the gradients over `group`, in `reduce_dtype` or else in their own dtype."""
    return apply_function(_CopyToRegion, x, group, reduce_dtype) if torch.is_grad_enabled() and x.requires_grad else x


def reduce_from_region(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """All-reduce over the ranks of `group`; backward is the identity.

    `in_place`: write the sum to `x`. Neither other code nor a recorded backward may read `x` afterwards.
    """
    records = torch.is_grad_enabled() and x.requires_grad
    # A dispatch mode may keep `x`: selective activation checkpointing passes it to the recomputation, which sums again.
    # Autograd keeps the base of a view.
    is_kept = records and (torch.compiler.is_dynamo_compiling() or direct.is_watched() or x._is_view())
    if in_place and x.is_contiguous() and not is_kept:
        if not records:
            direct.all_reduce(x, group)
            return x
        direct.all_reduce(x.detach(), group)
        # For higher-order gradients. Tensor.register_hook without the handle.
        x._backward_hooks = OrderedDict(reduced=partial(copy_to_region, group=group))
        x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]
        return x
    if not records:
        total = x.clone(memory_format=torch.contiguous_format)
        direct.all_reduce(total, group)
        return total
    return apply_function(_ReduceFromRegion, x, group, None)


def gather_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather the shards along `dim`; backward keeps this rank's shard of the gradient.

    `widths[rank]` is the shard length of that rank; `x` has length `widths[own rank]` along `dim`.
    """
    if not torch.is_grad_enabled():
        return all_gather_uneven(x, widths, group, dim=dim)
    return apply_function(_GatherFromRegion, x, tuple(widths), group, dim)


def scatter_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Keep this rank's shard of `x` along `dim`; backward all-gathers the gradients."""
    return apply_function(_ScatterToRegion, x, tuple(widths), group, dim)


def gather_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather the shards along `dim`; backward reduce-scatters the gradients."""
    return apply_function(_GatherToRegion, x, tuple(widths), group, dim)


def reduce_scatter_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Reduce-scatter `x` along `dim`; backward all-gathers the gradients."""
    return apply_function(_ReduceScatterFromRegion, x, tuple(widths), group, dim)


def exchange_regions(
    x: Tensor, widths: Sequence[int], parts: Sequence[int], group: Group, *, dim: int = -1, into: int = 0
) -> Tensor:
    """Change the sharded dim from `dim` to `into` (all-to-all); backward is the reverse all-to-all.

    `widths[rank]` is the length of that rank's `x` along `dim`, `parts[rank]` the length of its result along `into`.
    """
    return apply_function(_Exchange, x, (dim % x.ndim, tuple(widths)), (into % x.ndim, tuple(parts)), group)


def copy_shared(
    x: Tensor,
    shared: Sequence[Shared],
    length: int,
    group: Group,
    reduce_dtype: torch.dtype | None = None,
    *,
    dim: int,
) -> Tensor:
    """Identity; backward sums the gradients of replicated indices over the ranks that hold them.

    It is one all-reduce over all ranks of `group`, of `length` indices along `dim`. Each replicated index has a slot,
    which is zero on ranks that do not hold it. So no process group of the holders is needed.

    Args:
        shared: the ranges of `x` along `dim` that other ranks hold too; may be empty on some ranks.
        length: number of indices that several ranks hold, the same on all ranks.
        reduce_dtype: dtype of the sum, which is then rounded to the gradient's dtype; None for the gradient's dtype.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x
    places = tuple((entry.local, entry.slot, entry.length) for entry in shared)
    return apply_function(_CopyShared, x, places, length, dim, group, reduce_dtype)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """All-to-all of one number per rank: send `counts[rank]`, return the number that each rank sent: (size,)."""
    ones = [1] * group.size()
    return direct.all_to_all(counts, ones, ones, group)


def exchange_rows(tensors: Sequence[Tensor], sent: Counts, received: Counts, group: Group) -> tuple[Tensor, ...]:
    """Send rows of each of `tensors` to every rank, in one all-to-all; backward is the reverse all-to-all.

    Args:
        tensors: (sum of `sent`, any width) each, of any dtypes, rows sorted by destination rank. Integers have no
            gradient.
        sent: number of rows for each rank, this one included; may be 0.
        received: number of rows from each rank.
        group: collective over all its ranks, also those without rows.

    Returns:
        A tensor for each input: (sum of `received`, its width), rows sorted by source rank.
    """
    exchanged: tuple[Tensor, ...] = apply_directly(_ExchangeRows)(tuple(sent), tuple(received), group, *tensors)
    return exchanged


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity; backward multiplies the gradient by `factor`."""
    return apply_function(_Scale, x, 1.0, factor) if torch.is_grad_enabled() and x.requires_grad else x


def all_gather_uneven(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather shards of different lengths along `dim`, without autograd; shorter shards are sent with padding."""
    dim, longest, shortest = dim % x.ndim, max(widths), min(widths)
    gathered = direct.all_gather(_padded(x, longest, dim), group)
    if dim == 0 and shortest == longest:
        return gathered
    shards = gathered.chunk(len(widths))
    if shortest < longest:
        shards = tuple(shard.narrow(dim, 0, width) for shard, width in zip(shards, widths, strict=True))
    return torch.cat(shards, dim)


def _padded(x: Tensor, length: int, dim: int) -> Tensor:
    """Extend `dim` of `x` to `length` by elements of any value.

    Not by zeros: a compiled graph would share them with other zeros, and choose other kernels for these.
    """
    if x.shape[dim] == length:
        return x
    padding = list(x.shape)
    padding[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_empty(padding)], dim)


def all_gather_number(number: int, group: Group, device: torch.device | str) -> tuple[int, ...]:
    """All-gather one integer."""
    return tuple(all_gather_uneven(torch.tensor([number], device=device), [1] * group.size(), group).tolist())


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """The only output of `function.apply`; see `apply_directly`."""
    output: Tensor = apply_directly(function)(*args)
    return output


def apply_directly(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its torch.func support, which takes a third of the time."""
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
        return apply_function(_ReduceFromRegion, grads[0], ctx.group, ctx.reduce_dtype), None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        # A copy: other code may still read the caller's tensor.
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
        return apply_function(_ScatterToRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> Tensor:
        ctx.widths, ctx.group, ctx.dim = widths, group, dim
        rank = dist.get_rank(group)
        return x.narrow(dim, sum(widths[:rank]), widths[rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_function(_GatherFromRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _GatherToRegion(_GatherFromRegion):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_function(_ReduceScatterFromRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _ReduceScatterFromRegion(_ScatterToRegion):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], group: Group, dim: int) -> Tensor:
        ctx.widths, ctx.group, ctx.dim = widths, group, dim
        dim, longest = dim % x.ndim, max(widths)  # shorter shards are sent with padding
        shards = [_padded(shard, longest, dim) for shard in x.split(list(widths), dim)]
        own, width = direct.reduce_scatter(torch.cat(shards), group), widths[dist.get_rank(group)]
        return own if width == longest else own.narrow(dim, 0, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_function(_GatherToRegion, grads[0], ctx.widths, ctx.group, ctx.dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Sharding, into: Sharding, group: Group) -> Tensor:
        ctx.source, ctx.into, ctx.group = source, into, group
        (dim, widths), (into_dim, into_widths), rank = source, into, dist.get_rank(group)
        shapes = [list(x.shape) for _ in widths]
        for shape, width in zip(shapes, widths, strict=True):
            shape[dim], shape[into_dim] = width, into_widths[rank]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        chunks = [chunk.reshape(-1) for chunk in x.split(list(into_widths), into_dim)]
        received = direct.all_to_all(torch.cat(chunks), [chunk.numel() for chunk in chunks], sizes, group)
        return torch.cat([chunk.view(shape) for chunk, shape in zip(received.split(sizes), shapes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_function(_Exchange, grads[0], ctx.into, ctx.source, ctx.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Counts, received: Counts, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.settings = (received, sent, group)
        ctx.have_gradients = [tensor.is_floating_point() for tensor in tensors]
        # As bytes, so that one collective sends several dtypes.
        rows = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        arrived = direct.all_to_all(packed, sent, received, group)
        columns = arrived.split([row.shape[1] for row in rows], 1)
        outputs = [column.contiguous().view(tensor.dtype) for column, tensor in zip(columns, tensors, strict=True)]
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.settings
        kept = [grad for grad, has in zip(grads, ctx.have_gradients, strict=True) if has]
        exchanged = iter(exchange_rows(kept, sent, received, group))
        return (None, None, None, *(next(exchanged) if has else None for has in ctx.have_gradients))


class _CopyShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, places: tuple[Place, ...], length: int, dim: int, group: Group, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.settings = (places, length, dim, group, dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return apply_function(_ReduceShared, grads[0], *ctx.settings), None, None, None, None, None


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
        return apply_function(_CopyShared, grads[0], *ctx.settings), None, None, None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, of_gradient: float) -> Tensor:
        ctx.factors = (of_gradient, factor)
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return apply_function(_Scale, grads[0], *ctx.factors), None, None
