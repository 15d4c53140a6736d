"""Differentiable collectives for tensor parallelism, also for uneven shards.

The conjugate pairs of Megatron-LM (Shoeybi et al. 2019, "f" and "g" in its figure 3; Korthikanti et al. 2022 for
sequence parallelism): the backward of each function is the other collective of its pair. README.md has a table.

All are one autograd function of a pair of functions, whose backward is that of the pair in reverse, so that
higher-order gradients (`create_graph=True`) are exact too.

Sharded dims need not be divisible by the number of ranks: `widths` lists the shard length of every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
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
Place = tuple[int, int, int]
"""(start in this rank's shard, start in the all-reduced buffer, length)."""


def copy_to_region(x: Tensor, group: Group, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Identity; backward all-reduces the gradients over `group`, in `reduce_dtype` or else in their own dtype."""
    return apply_pair(x, same, _sum, group, reduce_dtype) if torch.is_grad_enabled() and x.requires_grad else x


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
    return apply_pair(x, _sum, same, group, None)


def gather_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather the shards along `dim`; backward keeps this rank's shard of the gradient.

    `widths[rank]` is the shard length of that rank; `x` has length `widths[own rank]` along `dim`.
    """
    if not torch.is_grad_enabled():
        return all_gather_uneven(x, widths, group, dim)
    return apply_pair(x, all_gather_uneven, _own, tuple(widths), group, dim)


def scatter_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Keep this rank's shard of `x` along `dim`; backward all-gathers the gradients."""
    return apply_pair(x, _own, all_gather_uneven, tuple(widths), group, dim)


def gather_to_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """All-gather the shards along `dim`; backward reduce-scatters the gradients."""
    return apply_pair(x, all_gather_uneven, _scatter_sum, tuple(widths), group, dim)


def reduce_scatter_from_region(x: Tensor, widths: Sequence[int], group: Group, *, dim: int = -1) -> Tensor:
    """Reduce-scatter `x` along `dim`; backward all-gathers the gradients."""
    return apply_pair(x, _scatter_sum, all_gather_uneven, tuple(widths), group, dim)


def exchange_regions(
    x: Tensor, widths: Sequence[int], parts: Sequence[int], group: Group, *, dim: int = -1, into: int = 0
) -> Tensor:
    """Change the sharded dim from `dim` to `into` (all-to-all); backward is the reverse all-to-all.

    `widths[rank]` is the length of that rank's `x` along `dim`, `parts[rank]` the length of its result along `into`.
    """
    return apply_pair(x, _exchange, _exchange_back, (dim % x.ndim, tuple(widths)), (into % x.ndim, tuple(parts)), group)


def copy_shared(
    x: Tensor, shared: Sequence[Shared], length: int, group: Group, reduce_dtype: torch.dtype | None = None, *, dim: int
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
    return apply_pair(x, same, _sum_shared, places, length, dim, group, reduce_dtype)


def all_gather_uneven(x: Tensor, widths: Sequence[int], group: Group, dim: int = -1) -> Tensor:
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


def apply_pair(x: Tensor, compute: Callable[..., Tensor], transpose: Callable[..., Tensor], *settings: Any) -> Tensor:
    """`compute(x, *settings)`, a linear function; backward: `transpose(gradient, *settings)`, and so on in turns.

    `compute` returns a new tensor, or a view of `x`.
    """
    return apply_directly(_Pair)(x, compute, transpose, settings)  # type: ignore[no-any-return]


def apply_directly(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its torch.func support, which takes a third of the time."""
    if torch.compiler.is_dynamo_compiling():
        return function.apply
    direct.refuse_transforms()
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Any, transpose: Any, settings: tuple[Any, ...]) -> Tensor:
        ctx.pair = (transpose, compute, settings)
        return compute(x, *settings)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad, is_kept = grads[0], ctx.pair[0] is same and not (torch.is_grad_enabled() and grads[0].requires_grad)
        return grad if is_kept else apply_directly(_Pair)(grad, *ctx.pair), None, None, None


def same(x: Tensor, *_: Any) -> Tensor:
    """`x`, for `apply_pair`."""
    return x.view_as(x)


def _sum(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
    # A copy: other code may still read the caller's tensor.
    if not torch.compiler.is_dynamo_compiling() and direct.is_watched() and group.size() > 1:
        return direct.all_reduced(x.to(reduce_dtype or x.dtype), group).to(x.dtype)
    total = x.to(reduce_dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
    direct.all_reduce(total, group)
    return total.to(x.dtype)


def _own(x: Tensor, widths: Sequence[int], group: Group, dim: int) -> Tensor:
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(widths[:rank]), widths[rank]).contiguous()


def _scatter_sum(x: Tensor, widths: Sequence[int], group: Group, dim: int) -> Tensor:
    dim, longest = dim % x.ndim, max(widths)  # shorter shards are sent with padding
    shards = [_padded(shard, longest, dim) for shard in x.split(list(widths), dim)]
    own, width = direct.reduce_scatter(torch.cat(shards), group), widths[dist.get_rank(group)]
    return own if width == longest else own.narrow(dim, 0, width)


def _exchange(x: Tensor, source: Sharding, into: Sharding, group: Group) -> Tensor:
    (dim, widths), (into_dim, into_widths), rank = source, into, dist.get_rank(group)
    shapes = [list(x.shape) for _ in widths]
    for shape, width in zip(shapes, widths, strict=True):
        shape[dim], shape[into_dim] = width, into_widths[rank]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    chunks = [chunk.reshape(-1) for chunk in x.split(list(into_widths), into_dim)]
    received = direct.all_to_all(torch.cat(chunks), [chunk.numel() for chunk in chunks], sizes, group)
    return torch.cat([chunk.view(shape) for chunk, shape in zip(received.split(sizes), shapes, strict=True)], dim)


def _exchange_back(x: Tensor, source: Sharding, into: Sharding, group: Group) -> Tensor:
    return _exchange(x, into, source, group)


def _sum_shared(
    x: Tensor, places: Sequence[Place], length: int, dim: int, group: Group, dtype: torch.dtype | None
) -> Tensor:
    total = x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
    buffer = total.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    for local, slot, width in places:
        buffer.narrow(dim, slot, width).copy_(x.narrow(dim, local, width))
    direct.all_reduce(buffer, group)
    for local, slot, width in places:
        total.narrow(dim, local, width).copy_(buffer.narrow(dim, slot, width))
    return total.to(x.dtype)
