"""The exchange of tokens for experts that transformers shards: an implementation in its `EPImplementationInterface`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import gather_from_region, scatter_to_region
from ...slices.layout import Ranks
from .exchange import combine, dispatch


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
