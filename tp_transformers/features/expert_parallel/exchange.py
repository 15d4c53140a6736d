"""Expert parallelism among ranks with different tokens: all-to-all to the ranks of the experts, and back.

    own tokens ── router ── tokens of E0, E1 ── all-to-all ── [ E0 E1 ] ── all-to-all ── Σ ── own tokens
                         └─ tokens of E2 ────── all-to-all ── [ E2 ] ───── all-to-all ─┘

No tokens are gathered or dropped (Lepikhin et al. 2020, "GShard", without capacities, as in Megatron-LM's all-to-all
dispatcher). A token is sent once to each rank that holds any of its experts, with its routing weights; that rank
returns one weighted sum over its experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...anatomy import fold_layers, holds_experts
from ...plans.binding import Binding
from ...ranks import direct
from ...ranks.collectives import Group, apply_directly, gather_from_region, scatter_to_region
from ...slices.layout import Ranks, Split
from ...strategies.forward.attach import forward_of, wrap_forward
from ...strategies.local import to_local
from ...strategies.signature import LOCAL, PARTIAL, SEQUENCE, Signature
from ..sequence.sequence import exchange_shards
from .complete import CompleteExpertsParallel, IsolatedParallel, never_empty


@dataclass(frozen=True)
class Route:
    """Routing of one forward on one rank: its tokens to experts, and tokens of all ranks to its experts."""

    sent: list[int]
    """Number of tokens sent to each rank."""
    received: list[int]
    """Number of tokens received from each rank."""
    count: int
    """Number of this rank's tokens."""
    tokens: Tensor
    """Index of this rank's token for each sent row: (sum of `sent`,)."""
    rows: Tensor
    """Index of the received row for each (token, expert) pair of this rank's experts: (pairs,)."""


class ExchangeExpertsParallel(CompleteExpertsParallel):
    """Around experts, each complete on one rank: send this rank's tokens to their experts (all-to-all), and receive the
    sums (all-to-all; backward of both: all-to-all). Parameters without rules are sharded by experts.

        [x / y] ── [x0 y0 / x1 y1] ── [f(x0 y0) / g(x1 y1)] ── [Σ(f(x0), g(x1)) / Σ(f(y0), g(y1))]

    Computes as `moe_tp_experts` if all ranks have the same tokens, as in generation.
    """

    split_dim = IsolatedParallel.split_dim

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Disable tracing: a compiled graph breaks here, since numbers of tokens depend on data."""
        super().completed(module, mesh)
        wrap_forward(module, torch.compiler.disable)

    def has_own_tokens(self, states: Tensor, mesh: DeviceMesh) -> bool:
        """True if ranks have different tokens in `states`; returns the same on all ranks."""
        raise NotImplementedError

    def check(self, module: nn.Module) -> None:
        """Raise ValueError unless `module` holds experts and takes tokens, expert ids and routing weights."""
        if not takes_expert_ids(module):
            raise ValueError(
                f"moe_all_to_all sends tokens by the ids of their experts, which {type(module).__name__} is not called "
                "with; use moe_tp_experts"
            )

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        notes = forward_of(module).notes
        if not self.has_own_tokens(to_local(inputs[:1])[0], mesh):
            notes["route"] = None
            return super().before(module, inputs, mesh)
        states, ids, weights, *others = to_local(inputs)
        assert self.experts is not None
        notes["route"], *given = dispatch(states, ids, weights, self.experts, mesh.get_group())
        return (*given, *others)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        route = forward_of(module).notes.pop("route")
        return super().after(module, outputs, mesh) if route is None else combine(outputs, route, mesh.get_group())


class SequenceExpertsParallel(ExchangeExpertsParallel):
    """Experts with the tokens of this rank's shard of the sequence."""

    signature = Signature(SEQUENCE, SEQUENCE, inside=(LOCAL, PARTIAL))

    def has_own_tokens(self, states: Tensor, mesh: DeviceMesh) -> bool:
        return exchange_shards(self.name, states, mesh)


def takes_expert_ids(module: nn.Module) -> bool:
    """True for experts that are called with tokens, expert ids and routing weights."""
    names = [*inspect.signature(type(module).forward).parameters][2:4]
    return holds_experts(module) and len(names) == 2 and "weight" in names[1]


def divided_experts(bound: Binding) -> Iterator[str]:
    """Faults: experts that exchange tokens, and are not complete on one rank."""
    for name, strategy in bound.module_strategies.items():
        layouts = bound.own_layouts(name) if isinstance(strategy, ExchangeExpertsParallel) else {}
        divided = [param for param, layout in layouts.items() if layout is None or layout.dim != 0]
        if divided:
            yield (
                f"{fold_layers(name)}: moe_all_to_all sends tokens to ranks that hold complete experts, but "
                f"{', '.join(divided)} would not be; make all of them local, or use moe_tp_experts"
            )


def dispatch(
    states: Tensor, ids: Tensor, weights: Tensor, experts: Split, group: Group
) -> tuple[Route, Tensor, Tensor, Tensor]:
    """Send this rank's tokens to their experts, and receive those for its own: a row per (token, expert) pair.

    Args:
        states: this rank's tokens: (tokens, hidden).
        ids: expert ids: (tokens, k).
        weights: routing weights: (tokens, k).
        experts: the split of the experts over the ranks, a consecutive range each.
        group: the ranks.

    Returns:
        The route back; tokens (pairs, hidden); local expert ids (pairs, 1); routing weights (pairs, 1). A rank that
        receives no token computes one of zeros, so that its backward calls the same collectives.
    """
    ranges = [rank_ranges[0] for rank_ranges in experts.ranges]
    starts, ends = (torch.tensor(bounds, dtype=ids.dtype, device=ids.device) for bounds in zip(*ranges, strict=True))
    owners = torch.bucketize(ids.contiguous(), ends, right=True)
    sends = (owners.unsqueeze(-1) == torch.arange(len(ranges), device=ids.device)).any(1)  # (tokens, ranks)
    counts = sends.sum(0)
    one_each = [1] * group.size()
    sent, received = torch.stack([counts, direct.all_to_all(counts, one_each, one_each, group)]).tolist()
    ranks, tokens = sends.t().nonzero(as_tuple=True)
    is_owner = owners[tokens] == ranks[:, None]
    local_ids = torch.where(is_owner, ids[tokens] - starts[ranks, None], -1).int()
    rows = (states.index_select(0, tokens), weights.index_select(0, tokens), local_ids)
    received_states, received_weights, received_ids = map(never_empty, exchange_rows(rows, sent, received, group))
    row_index, slots = (received_ids >= 0).nonzero(as_tuple=True)
    route = Route(sent, received, len(states), tokens, row_index)
    expert_ids = received_ids[row_index, slots].long()
    return (
        route,
        received_states.index_select(0, row_index),
        expert_ids[:, None],
        received_weights[row_index, slots][:, None],
    )


def combine(outputs: Tensor, route: Route, group: Group) -> Tensor:
    """Send back the outputs of this rank's experts, (pairs, hidden); sum those for its tokens: (tokens, hidden)."""
    length = sum(route.received)
    sums = _sum_rows(outputs, route.rows, max(length, 1))[:length]
    (returned,) = exchange_rows((sums,), route.received, route.sent, group)
    return _sum_rows(returned, route.tokens, route.count)


def _sum_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum the rows of `x` with equal index in `rows`, in fp32 or wider: (count, hidden)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros((count, x.shape[1]), dtype=wide).index_add(0, rows, x.to(wide)).to(x.dtype)


def exchange_rows(
    tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: Group
) -> tuple[Tensor, ...]:
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


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: Sequence[int], received: Sequence[int], group: Group, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
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


class ExpertExchange:
    """An `EPImplementation` of transformers (5.23 and later): sends a token once to each rank of its experts.

        own tokens ── slice of this rank of tp ── all-to-all ── [ experts ] ── all-to-all ── Σ ── gather ── own tokens

    transformers' own `all_to_all` sends a row for each expert of a token. The ranks of the `tp` axis have the same
    tokens, so each of them sends a slice of the tokens.
    """

    needs_shared_batch = False

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        """Prepare the exchange for one module of experts.

        Args:
            experts: experts with parameters (experts of this rank, ...) and their number as `num_experts`.
            ep_mesh: the ranks that have different experts, as many each.
            tp_mesh: the ranks that have the same tokens.
        """
        self.forward = experts.forward
        self.experts = Ranks(ep_mesh.size()).split(int(experts.num_experts) * ep_mesh.size())  # type: ignore[arg-type]
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh

    def __call__(self, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of this rank's tokens.

        Args:
            states: tokens (tokens, hidden).
            ids: ids among all experts (tokens, k).
            weights: routing weights (tokens, k).

        Returns:
            The weighted sums (tokens, hidden).
        """
        widths, group = Ranks(self.tp_mesh.size()).split(len(states)).widths, self.ep_mesh.get_group()
        if len(widths) > 1:
            tp_group: Any = self.tp_mesh.get_group()
            states, ids, weights = (scatter_to_region(x, widths, tp_group, dim=0) for x in (states, ids, weights))
        route, *given = dispatch(states, ids, weights, self.experts, group)
        sums = combine(self.forward(*given), route, group)
        return gather_from_region(sums, widths, tp_group, dim=0) if len(widths) > 1 else sums
