"""Norms between sharded linears that have the bits of one process: they compute with all features, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError
from ...ranks.collectives import Group, all_gather_uneven, apply_pair, scatter_to_region
from ...slices.layout import Split
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ...strategies.signature import LOCAL, REPLICATED, Signature
from .products import LAST, InBlocks, gather_features


class InvariantNormParallel(InBlocks):
    """In place of `sharded_norm`: gather the features, norm all of them, keep this rank's.

    Every rank holds the full weight (forward: all-gather; backward: all-gather).

        [x | y] ── n(xy) ── [x' | y']
    """

    signature = Signature(LOCAL, LOCAL, inside=(REPLICATED, REPLICATED))
    features = 0
    """Features of the unsharded module."""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        assert isinstance(bound, InvariantNormParallel)
        bound.features = next((param.shape[LAST] for param in module.parameters(recurse=False)), 0)
        return bound

    def gathered(self) -> Iterable[Split]:
        return (self.split_length(self.features, self.size),)

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (gather_features(inputs[0], self.split_length(self.features, self.size), mesh.get_group()), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return scatter_to_region(outputs, self.split_length(self.features, self.size).widths, mesh.get_group())


class InvariantHeadNormParallel(TensorParallelLayer):
    """In place of `replicated_with_grad_allreduce` in attention: a norm within heads.

    Inference norms this rank's heads. With gradients, all heads are gathered, and this rank's are kept (forward:
    all-gather; backward: all-gather), so that the gradient of the weight adds up all heads as one process does.

        [x | y] ── n(xy) ── [x' | y']
    """

    keeps_order = True
    signature = Signature(LOCAL, LOCAL, inside=(REPLICATED, REPLICATED))

    def __init__(self, counts: Sequence[tuple[int, ...]]) -> None:
        """`counts`: heads of each rank, of queries and of keys."""
        super().__init__()
        self.counts = sorted(counts, key=sum)

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x: Tensor = inputs[0]
        if not (torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters()))):
            return inputs
        forward_of(module).notes["heads"] = heads = self._heads(x)
        return (apply_pair(x, _gather_heads, _keep_heads, *heads, mesh.get_group(), None), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        heads = forward_of(module).notes.get("heads")
        if heads is None:
            return outputs
        # A compiled sum visits the dims in the order of the input: its gradient is not stored before it is summed.
        order = _memory_order(outputs, heads[1]) if torch.compiler.is_dynamo_compiling() else None
        return apply_pair(outputs, _keep_heads, _gather_heads, *heads, mesh.get_group(), order)

    def _heads(self, x: Tensor) -> tuple[tuple[int, ...], int]:
        """(heads of each rank, the dim of the heads): (batch, sequence, heads, features), or heads before sequence.

        The features of a token are (heads, features) in memory, so the strides tell a dim of heads from a sequence of
        the same length. They are equal beside a single head, which is then the smaller count.
        """
        fitting = [(counts, dim) for counts in self.counts for dim in (-2, -3) if counts[self.rank] == x.shape[dim]]
        by_stride = [(counts, dim) for counts, dim in fitting if x.stride(dim) == x.shape[LAST]]
        if not fitting:
            got, fix = f"an input of shape {tuple(x.shape)}", "Leave out tp_invariant, or the gradients of this module."
            raise UnsupportedError(self.name, got=got, expected=f"heads of {self.counts}", fix=fix)
        return (by_stride or fitting)[0]


def _memory_order(x: Tensor, dim: int) -> tuple[int, ...]:
    """The dims of `x` in their order in memory; a single head, along `dim`, has the stride of the dim before it."""
    strides, heads = x.stride(), dim % x.ndim
    order: list[int] = []
    for axis in range(x.ndim):  # not by sorted(), to which torch.compile gives no symbolic strides
        level = [other for other in order if strides[other] == strides[axis] and (other != heads or axis == heads)]
        order.insert(len([other for other in order if strides[other] > strides[axis]]) + len(level), axis)
    return tuple(order)


def _gather_heads(x: Tensor, counts: tuple[int, ...], dim: int, group: Group, order: tuple[int, ...] | None) -> Tensor:
    """All-gather; the result has its dims in memory in `order`, in which sums visit them, or else in that of `x`."""
    order = order or _memory_order(x, dim)
    gathered = all_gather_uneven(x.permute(order), counts, group, dim=order.index(dim % x.ndim))
    return gathered.permute([order.index(axis) for axis in range(x.ndim)])


def _keep_heads(x: Tensor, counts: tuple[int, ...], dim: int, group: Group, order: tuple[int, ...] | None) -> Tensor:
    """This rank's shard."""
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(counts[:rank]), counts[rank]).clone()
