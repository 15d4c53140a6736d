"""Blocks that compare sharded features with each other, such as Gemma 3n's MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ...ranks.collectives import Group, copy_to_region, reduce_from_region
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import wrap_forward
from ...strategies.forward.communication import Forwarder
from ...strategies.linear import LAST
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import LOCAL, Signature


class ShardedMomentsParallel(TensorParallelLayer):
    """Statistics over sharded features, for a block with a threshold that depends on all features, such as an MLP with
    sparse activations: in the block, torch.mean and torch.std over the last dim are those of the full width, which is
    the rule's `widths` (one all-reduce of two numbers per token and rank; backward: all-reduce).

        [x | y] ── mean, std of xy ── [x' | y']
    """

    signature = Signature(inside=(LOCAL, LOCAL))

    def check(self, module: nn.Module) -> None:
        """The rule must declare exactly one width."""
        if len(self.widths) != 1:
            raise ValueError("sharded_moments needs exactly one sharded width: {widths: intermediate_size}")

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Compute moments over all ranks in the forward."""
        (width,) = self.widths.values()
        counts, group = self.ranks.counts(width), mesh.get_group()

        def around(call: Forwarder) -> Forwarder:
            def forward(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with _Moments(counts, self.rank, group):
                    return call(mod, *args, **kwargs)

            return forward

        wrap_forward(module, around)


class _Moments(TorchFunctionMode):
    """Computes torch.mean and torch.std over the last dim over the features of all ranks.

    Args:
        counts: number of features of every rank, from `Ranks.counts`.
    """

    def __init__(self, counts: Sequence[int], rank: int, group: Group) -> None:
        super().__init__()
        self.counts, self.rank, self.group = counts, rank, group
        self.last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        """A tensor, the mean of its features and the sum of their squared distances from the mean, over all ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.mean, torch.std) or kwargs.get("dim") != LAST or not kwargs.get("keepdim"):
            return func(*args, **kwargs)
        x = args[0]
        if self.last is None or self.last[0] is not x:
            self.last = x, self._moments(x)
        mean, squares = self.last[1]
        free = kwargs.get("correction", int(kwargs.get("unbiased", True)))
        return (mean if func is torch.mean else torch.sqrt(squares / (sum(self.counts) - free))).to(x.dtype)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size, length = len(self.counts), sum(self.counts)
        counts = torch.cat([wide.new_full((1,), count) for count in self.counts])  # a copy from the host would wait
        own = wide.mean(LAST, keepdim=True)
        both = torch.stack((own, (wide - own).square().sum(LAST, keepdim=True)))
        slots = pad(both, (self.rank, size - 1 - self.rank))
        means, squares = copy_to_region(reduce_from_region(slots, self.group), self.group)
        mean = (means * counts).sum(LAST, keepdim=True) / length
        return mean, (squares + counts * (means - mean).square()).sum(LAST, keepdim=True)
