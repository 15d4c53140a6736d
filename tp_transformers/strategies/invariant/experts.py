"""Experts that have the bits of one process on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from ...ranks import direct
from ...ranks.collectives import Group, apply_function, reduce_from_region
from ..experts import IsolatedParallel
from ..forward.attach import forward_of
from ..local import to_local
from ..signature import PARTIAL, REPLICATED, Signature

BY_EXPERT, BY_SLOT = "eager", "grouped_mm"
"""Implementations of transformers' experts: they add up a token's experts by id, or in the order of its routing."""


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
        if "_is_expert_parallel" not in vars(module):
            raise ValueError(f"a {type(module).__name__} has no implementation with a known order of its experts")

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        states, ids, weights, *rest = to_local(inputs)
        kind = getattr(getattr(module, "config", None), "_experts_implementation", None) or BY_EXPERT
        if kind not in (BY_EXPERT, BY_SLOT):
            expected, fix = f"{BY_EXPERT} or {BY_SLOT}", "Load it with one of these as experts_implementation."
            raise UnsupportedError(self.name, got=f"{kind}, with tp_invariant", expected=expected, fix=fix)
        assert self.experts is not None
        start, stop = self.experts.ranges[self.rank][0]
        of_rows = (ids.t() if kind == BY_EXPERT else ids).reshape(-1)
        own = ((of_rows >= start) & (of_rows < stop)).nonzero().squeeze(1)
        if kind == BY_SLOT:
            own = _before_sort(own, of_rows)
        forward_of(module).notes["routing"] = (kind, ids, weights, own)
        rows = apply_function(_OwnRows, states, own, ids, kind, mesh.get_group())
        own_ids = of_rows[own] - start
        if not len(own):  # a row of zeros keeps the products, and their gradients
            rows, own_ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own_ids.new_zeros(1)
        return (rows, own_ids.unsqueeze(1), rows.new_ones(len(own_ids), 1), *rest)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        kind, ids, weights, own = forward_of(module).notes["routing"]
        rows = outputs.new_zeros(ids.numel(), outputs.shape[1]).index_copy(0, own, outputs[: len(own)])
        rows = reduce_from_region(rows, mesh.get_group())
        if kind == BY_SLOT:
            weighted = rows.view(*ids.shape, -1) * weights.unsqueeze(-1)
            return weighted.sum(1).to(rows.dtype)
        weighted = (_by_slot(rows, ids, kind) * weights.unsqueeze(-1)).to(rows.dtype)
        return _add_up(weighted, ids.argsort(-1))


def _by_slot(rows: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Rows in the order of the implementation as (tokens, experts per token, hidden)."""
    tokens, count = ids.shape
    return rows.view(count, tokens, -1).transpose(0, 1) if kind == BY_EXPERT else rows.view(tokens, count, -1)


def _before_sort(own: Tensor, of_rows: Tensor) -> Tensor:
    """The rows `own`, so arranged that the implementation's unstable sort of their experts leaves them in the order in
    which it leaves them among all rows, which have the experts `of_rows`."""
    is_own = torch.zeros_like(of_rows, dtype=torch.bool).index_fill(0, own, True)
    order = torch.sort(of_rows).indices
    order = order[is_own[order]]
    return torch.empty_like(order).index_copy(0, torch.sort(of_rows[order]).indices, order)


def _add_up(by_slot: Tensor, order: Tensor) -> Tensor:
    """Add up (tokens, experts per token, hidden) one after the other, in the `order` of each token."""
    total, *others = by_slot.gather(1, order.unsqueeze(-1).expand_as(by_slot)).unbind(1)
    for other in others:
        total = total + other
    return total


class _OwnRows(torch.autograd.Function):
    """The rows of this rank's experts; backward adds up the gradients of all rows of a token in one order.

    The backward of one process visits eager experts from the last to the first, and grouped ones from the first.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, own: Tensor, ids: Tensor, kind: str, group: Group) -> Tensor:
        ctx.save_for_backward(own, ids)
        ctx.kind, ctx.group = kind, group
        return states[own % ids.shape[0] if kind == BY_EXPERT else own // ids.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        own, ids = ctx.saved_tensors
        rows = grad.new_zeros(ids.numel(), grad.shape[1])
        rows[own] = grad
        direct.all_reduce(rows, ctx.group)
        order = ids.argsort(-1, descending=ctx.kind == BY_EXPERT)
        return _add_up(_by_slot(rows, ids, ctx.kind), order), None, None, None, None
