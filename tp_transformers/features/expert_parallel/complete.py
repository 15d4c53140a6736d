"""Complete experts: each rank holds some of them (`local`), and computes these alone.

    E0 E1 E2 -> [E0 E1 | E2]

A rank's output is a partial sum; `moe_tp_experts` on the experts, or `gather` on the enclosing block, adds it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ...slices.layout import Ranks, Split
from ...strategies.experts import BATCHED, ExpertsParallel, MoEExpertsParallel, is_routed
from ...strategies.forward.attach import forward_of
from ...strategies.local import to_local
from ...strategies.shards.shard import ParamShard

GROUPED = "grouped_mm"
"""Implementation of transformers' experts with one product for the rows of all experts."""


class IsolatedParallel(ExpertsParallel):
    """The module computes with this rank's tensors alone, without communication.

    On experts, or on a parameter of experts, each rank holds complete experts, as evenly as possible (expert
    parallelism): ids of other ranks' experts get weight zero. Beside a single expert, `before` may select its rows, and
    `after` then puts them back among all tokens. Other parameters are replicated.
    """

    use_dtensor = False
    experts: Split | None = None
    """Split of the experts over the ranks; None without experts, or if each expert is sharded."""

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The dim of the experts, if the module holds any."""
        return 0 if self.holds_experts else None

    def _split_length(self, length: int, ranks: Ranks, unit: int) -> Split:
        if self.holds_experts and length < ranks.size:
            raise ValueError(
                f"{length} experts cannot be spread over {ranks.size} ranks, since each rank needs one; shard every "
                f"expert (packed_colwise, rowwise), or use at most {length} ranks"
            )
        return super()._split_length(length, ranks, unit)

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Store the split of the experts (sharded along dim 0)."""
        super().attached(module, shards, mesh)
        layouts = [shard.layout for shard in shards.values() if len(shard.shape) == 3]
        self.experts = next((layout.split for layout in layouts if layout is not None and layout.dim == 0), None)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The number of this rank's experts."""
        if self.experts is None:
            return super().local_attributes(module, rank)
        local = {"num_experts": self.experts.widths[rank], "_is_expert_parallel": True}
        return {name: value for name, value in local.items() if name in module.__dict__}

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        inputs, experts = to_local(inputs), self.experts
        if experts is None:
            return inputs
        start, stop = experts.ranges[self.rank][0]
        if len(inputs) == 1:  # tokens come sorted by expert: (experts * tokens, hidden)
            by_expert = inputs[0].view(experts.length, -1, inputs[0].shape[-1])
            return (by_expert[start:stop].reshape(-1, inputs[0].shape[-1]),)
        states, ids, weights, *rest = inputs
        here = (ids >= start) & (ids < stop)
        weights = weights.masked_fill(~here, 0)
        kind = implementation_of(module)
        if kind == GROUPED and stop - start == 1 and may_select_rows(states):
            # torch.histc takes min = max for the range of the data, so that a single expert would get all rows.
            tokens, slots = here.nonzero(as_tuple=True)
            forward_of(module).notes["tokens"] = tokens, len(states)
            ids = tokens.new_zeros(len(tokens), 1)
            return (*map(never_empty, (states[tokens], ids, weights[tokens, slots].unsqueeze(1))), *rest)
        # Past its experts: grouped products skip the rows of these ids, batched ones drop their results.
        elsewhere = stop - start if kind is not None and "_is_expert_parallel" in module.__dict__ else 0
        return (states, torch.where(here, ids - start, elsewhere), weights, *rest)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        experts = self.experts
        if experts is None:
            return outputs
        if is_routed(module):
            tokens, count = forward_of(module).notes.get("tokens", (None, 0))
            if tokens is None:
                return outputs
            return outputs.new_zeros(count, outputs.shape[1]).index_add(0, tokens, outputs[: len(tokens)])
        start, stop = experts.ranges[self.rank][0]
        by_expert = outputs.view(stop - start, -1, outputs.shape[-1])
        return pad(by_expert, (0, 0, 0, 0, start, experts.length - stop)).flatten(0, 1)


class CompleteExpertsParallel(MoEExpertsParallel, IsolatedParallel):
    """`moe_tp_experts`, also around complete experts."""


def implementation_of(module: nn.Module) -> str | None:
    """GROUPED or BATCHED if that implementation of transformers computes the experts; None for their own loop."""
    kind = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return kind if kind in (GROUPED, BATCHED) and has_implementations(module) else None


def has_implementations(module: nn.Module) -> bool:
    """True for experts that transformers' `use_experts_implementation` decorates."""
    return "has_gate" in vars(module)


def may_select_rows(states: Tensor) -> bool:
    """True if rows of `states` may be selected: a graph cannot have a number of rows that depends on data."""
    is_plain = not states.is_meta and type(states) in (Tensor, nn.Parameter)
    return is_plain and not torch.compiler.is_compiling() and not is_captured(states)


def is_captured(states: Tensor) -> bool:
    """True if the CUDA stream of `states` captures a graph."""
    return states.is_cuda and torch.cuda.is_current_stream_capturing()


def never_empty(rows: Tensor, least: int = 1) -> Tensor:
    """`rows` (rows, features), with rows of zeros up to `least`: they keep the products, and their gradients."""
    return rows if len(rows) >= least else torch.cat([rows, rows.new_zeros(least - len(rows), rows.shape[1])])
