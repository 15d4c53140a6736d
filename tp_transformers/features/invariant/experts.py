"""Experts that have the bits of one process on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from ...ranks.collectives import Group, apply_directly, reduce_from_region
from ...strategies.experts import BATCHED
from ...strategies.forward.attach import forward_of
from ...strategies.local import to_local
from ...strategies.signature import PARTIAL, REPLICATED, Signature
from ..expert_parallel.complete import (
    GROUPED,
    IsolatedParallel,
    has_implementations,
    is_captured,
    may_select_rows,
    never_empty,
)

BY_EXPERT, BY_SLOT = "eager", (GROUPED, BATCHED)
"""Implementations of transformers' experts: they add up a token's experts by id, or in the order of its routing.

On a GPU `generate` replaces grouped products by batched ones for all tokens but the prompt's.
"""


class InvariantExpertsParallel(IsolatedParallel):
    """Complete experts on each rank, which add up the experts of a token in the order of one process.

    Every pair of a token and one of its experts is a row: (tokens * experts per token, hidden). One rank computes it,
    the others leave zeros (forward: all-reduce of the rows; backward: all-reduce of their gradients). Then each rank
    adds up the rows of a token in the order of the module's implementation.
    """

    keeps_order = True
    signature = Signature(REPLICATED, REPLICATED, inside=(REPLICATED, PARTIAL))

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """None: the parameters have rules of their own."""
        return None

    def check(self, module: nn.Module) -> None:
        """Accept experts with one of transformers' implementations, which multiply a row by its routing weight."""
        if not has_implementations(module):
            raise ValueError(f"a {type(module).__name__} has no implementation with a known order of its experts")

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        states, ids, weights, *rest = to_local(inputs)
        kind = getattr(getattr(module, "config", None), "_experts_implementation", None) or BY_EXPERT
        self._check_kind(kind, states, weights)
        assert self.experts is not None
        start, stop = self.experts.ranges[self.rank][0]
        of_rows = (ids.t() if kind == BY_EXPERT else ids).reshape(-1)
        is_own = (of_rows >= start) & (of_rows < stop)
        own_ids = torch.where(is_own, of_rows - start, stop - start)
        # In a graph, products take all rows: grouped ones skip the others', unless this rank has a single expert, and
        # batched ones multiply them.
        is_single = kind == GROUPED and stop - start == 1
        selects = kind == BY_EXPERT or may_select_rows(states) or (is_single and not is_captured(states))
        if kind == GROUPED:
            taken = _as_sorted(of_rows, own_ids, int(is_own.sum()) if selects else None)
        elif selects:
            taken = is_own.nonzero().squeeze(1)
        else:
            taken = torch.arange(len(of_rows), device=ids.device)
        others = None if selects else ~is_own[taken].unsqueeze(1)
        forward_of(module).notes["routing"] = (kind, ids, weights, taken, others)
        rows = apply_directly(_Rows)(states, taken, others, ids, kind, mesh.get_group())
        own_ids = own_ids[taken].unsqueeze(1)
        if selects:
            # A batch of a single matrix is multiplied as a matrix, whose sums have another order.
            least = min(2, ids.numel()) if kind == BATCHED else 1
            rows, own_ids = never_empty(rows, least), never_empty(own_ids, least)
        return (rows, own_ids, rows.new_ones(len(own_ids), 1), *rest)

    def _check_kind(self, kind: str, states: Tensor, weights: Tensor) -> None:
        """Raise UnsupportedError for an implementation without a known order, or with roundings that ranks lack."""
        is_rounded = torch.promote_types(states.dtype, weights.dtype) != weights.dtype  # by a router under autocast
        known = (GROUPED,) if is_rounded else (BY_EXPERT, *BY_SLOT)
        if kind in known:
            return
        got, fix = f"{kind}, with tp_invariant", f"Load it with experts_implementation={GROUPED!r}."
        if is_rounded:  # on a GPU, `generate` takes batched products
            got += f" and routing weights of {weights.dtype} for tokens of {states.dtype}"
            fix = f"Load it in the dtype of autocast, or with experts_implementation={GROUPED!r}."
        raise UnsupportedError(self.name, got=got, expected=" or ".join(known), fix=fix)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        kind, ids, weights, taken, others = forward_of(module).notes["routing"]
        rows = _of_all(outputs[: len(taken)], taken, others, ids.numel())
        rows = reduce_from_region(rows, mesh.get_group())
        if kind in BY_SLOT:
            weighted = rows.view(*ids.shape, rows.shape[1]) * weights.unsqueeze(-1)
            return weighted.sum(1).to(rows.dtype)
        weighted = (_by_slot(rows, ids, kind) * weights.unsqueeze(-1)).to(rows.dtype)
        return _add_up(weighted, ids.argsort(-1))


def _by_slot(rows: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Rows in the order of the implementation as (tokens, experts per token, hidden)."""
    tokens, count = ids.shape
    if kind == BY_EXPERT:
        return rows.view(count, tokens, rows.shape[1]).transpose(0, 1)
    return rows.view(tokens, count, rows.shape[1])


def _as_sorted(of_rows: Tensor, own_ids: Tensor, count: int | None) -> Tensor:
    """Rows, so arranged that the implementation's unstable sort of `own_ids` leaves those of this rank's experts in the
    order in which its sort of `of_rows`, the experts of all ranks, leaves them: the first `count`, or all."""
    order = torch.sort(of_rows).indices
    order = order[torch.sort(own_ids[order], stable=True).indices][:count]
    return torch.empty_like(order).index_copy(0, torch.sort(own_ids[order]).indices, order)


def _of_all(rows: Tensor, taken: Tensor, others: Tensor | None, count: int) -> Tensor:
    """(count, hidden): `rows` at the indices `taken`, and zeros for `others` and for all that were not taken."""
    own = rows if others is None else rows.masked_fill(others, 0)
    return rows.new_zeros(count, rows.shape[1]).index_copy(0, taken, own)


def _add_up(by_slot: Tensor, order: Tensor) -> Tensor:
    """Add up (tokens, experts per token, hidden) one after the other, in the `order` of each token."""
    total, *others = by_slot.gather(1, order.unsqueeze(-1).expand_as(by_slot)).unbind(1)
    for other in others:
        total = total + other
    return total


class _Rows(torch.autograd.Function):
    """The rows that a rank takes, with zeros in `others`; backward adds up a token's gradients of rows in one order.

    The backward of one process visits eager experts from the last to the first, and grouped ones from the first;
    batched products have copies of a token, which one sum adds up.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, taken: Tensor, others: Tensor | None, ids: Tensor, kind: str, group: Group
    ) -> Tensor:
        ctx.save_for_backward(taken, others, ids)
        ctx.kind, ctx.group = kind, group
        rows = states[taken % ids.shape[0] if kind == BY_EXPERT else taken // ids.shape[1]]
        return rows if others is None else rows.masked_fill(others, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        taken, others, ids = ctx.saved_tensors
        rows = reduce_from_region(_of_all(grad, taken, others, ids.numel()), ctx.group, in_place=True)
        by_slot, order = _by_slot(rows, ids, ctx.kind), ids.argsort(-1, descending=ctx.kind == BY_EXPERT)
        gradient = by_slot.sum(1) if ctx.kind == BATCHED else _add_up(by_slot, order)
        return gradient, None, None, None, None, None
