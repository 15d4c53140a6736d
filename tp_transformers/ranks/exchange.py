"""Rows of tensors that ranks exchange, each as many as it has for another (all-to-all with uneven parts).

Like the functions of `collectives.py`, they apply themselves in a backward, so that gradients of gradients are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, apply_directly

Counts = Sequence[int]
"""A number of rows for every rank."""


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """The number that every rank has for this one; `counts[rank]` is that which this one has for `rank`: (size,)."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def exchange_rows(tensors: Sequence[Tensor], sent: Counts, received: Counts, group: Group) -> tuple[Tensor, ...]:
    """Send rows of each of `tensors` to every rank, in one all-to-all; backward is the reverse all-to-all.

    Args:
        tensors: (sum of `sent`, any width) each, of any dtypes, by the rank that rows are for. Integers have no
            gradient.
        sent: rows for every rank, this one included; any may be 0.
        received: rows from every rank.
        group: the ranks, all of which have to call it, also those without any rows.

    Returns:
        A tensor for each: (sum of `received`, its width), by the rank that rows come from.
    """
    found: tuple[Tensor, ...] = apply_directly(_ExchangeRows)(tuple(sent), tuple(received), group, *tensors)
    return found


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Counts, received: Counts, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.settings = (received, sent, group)
        ctx.have_gradients = [tensor.is_floating_point() for tensor in tensors]
        # As bytes, so that values of several dtypes travel together.
        rows = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        arrived = packed.new_empty((sum(received), packed.shape[1]))
        dist.all_to_all_single(arrived, packed, list(received), list(sent), group=group)
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
