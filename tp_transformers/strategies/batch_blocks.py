"""Modules that gather the samples of ranks which have batches of their own: blocks, heads and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ..collectives import (
    Group,
    all_gather_uneven,
    exchange_regions,
    gather_to_region,
    reduce_scatter_from_region,
    scale_gradient,
)
from ..errors import PlanError, describe
from .base import Placements, TensorParallelLayer
from .batch import BATCH, Batch, batch_of
from .linear import LAST, ColwiseParallel, RowwiseParallel
from .local import to_local
from .region import GatherMixin, RegionBlock, WholeMixin, Widths

FROM_POSITIONS = ("attention_mask", "position_ids", "position_embeddings")
"""Arguments that are the same for all samples, and on all ranks, where none of them pads or says positions."""


class BatchBlock(RegionBlock):
    """A block that computes on the samples of all ranks, between modules that compute on a rank's own."""

    dim = BATCH
    splits_batch = True
    batch: Batch | None = None
    """Of the forward that is under way."""
    x: Tensor | None = None
    """Its input, joined."""

    def parts_of(self, x: Tensor, mesh: DeviceMesh) -> Widths | None:
        """See `RegionBlock.parts_of`."""
        self.batch = batch_of(x, mesh, in_layers=True)
        return None if self.batch is None else self.batch.widths

    def rows_of(self, x: Tensor, widths: Widths) -> Tensor:
        """See `RegionBlock.rows_of`."""
        return x.unflatten(0, (sum(widths), -1)) if x.shape[0] % sum(widths) == 0 else x

    def enter(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.enter`; the gradient is that of the sum of losses again."""
        self.x = super().enter(x if widths is None else scale_gradient(x, group.size()), widths, group)
        return self.x

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.leave`; the gradient becomes that of the mean of losses."""
        x = super().leave(x, widths, group)
        return x if widths is None else scale_gradient(x, 1 / group.size())

    def stop(self) -> None:
        """See `RegionBlock.stop`."""
        super().stop()
        self.batch = self.x = None

    def prepare_beside(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `TensorParallelLayer.prepare_beside`: whatever goes with samples is joined, too."""
        if self.batch is None:
            return args, keywords
        names = [*signature(type(module).forward).parameters][1:] + [""] * len(args)
        args = tuple(self._beside(name, value, module, mesh) for name, value in zip(names, args, strict=False))
        return args, {name: self._beside(name, value, module, mesh) for name, value in keywords.items()}

    def _beside(self, name: str, value: Any, module: nn.Module, mesh: DeviceMesh) -> Any:
        """The argument `name` for the samples of all ranks."""
        batch, group = self.batch, mesh.get_group()
        assert batch is not None
        if value is self.x or not (isinstance(value, Tensor | tuple) or name == "attention_mask"):
            return value
        # All samples have the same; but what is kept for a backward has the shape that it would have, computed again.
        if name in FROM_POSITIONS and not batch.differs and not torch.is_grad_enabled():
            return _each(value, lambda tensor: tensor[:1] if tensor.ndim > 1 else tensor)
        known = batch.joined.setdefault(name, [])
        which = next((at for at, (mine, _) in enumerate(known) if mine is value and value is not None), len(known))
        if name == "attention_mask" and not batch.differs and value is None:
            return None
        if name == "attention_mask" and batch.differs:  # transformers leaves out what masks nothing, on each rank
            assert self.x is not None
            vote = torch.tensor([-1 if value is None else which], device=self.x.device)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=group)
            which = int(vote.item())
            if which < 0:
                return None
        if which == len(known):
            own, whole = batch.widths[mesh.get_local_rank()], self._mask(module) if value is None else value
            whole = _each(whole, lambda tensor: self._join_beside(name, tensor, own, batch.widths, group))
            known.append((value, whole))
        return known[which][1]

    def _join_beside(self, name: str, tensor: Tensor, own: int, widths: Widths, group: Group) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        if tensor.shape[0] not in (1, own):
            raise self.misfit(name, tensor, own)
        tensor = tensor.expand(own, *tensor.shape[1:])
        if not tensor.requires_grad:
            return all_gather_uneven(tensor, widths, group, dim=BATCH)
        return self.join(scale_gradient(tensor, group.size()), widths, group)

    def _mask(self, module: nn.Module) -> Tensor:
        """What no mask stands for: (batch, length) for flash attention, else (batch, 1, length, length)."""
        assert self.batch is not None
        assert self.x is not None
        length, device = self.x.shape[1], self.x.device
        if "flash" in str(getattr(getattr(module, "config", None), "_attn_implementation", None)):
            return torch.ones(1, length, dtype=torch.bool, device=device)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
        return mask.tril() if getattr(module, "is_causal", True) else mask

    def misfit(self, what: str, x: Tensor, length: int) -> PlanError:
        """See `RegionBlock.misfit`."""
        return PlanError(
            describe(
                self.name,
                got=f"{what} of shape {tuple(x.shape)}",
                expected=f"({length}, ...), as the batch is cut",
                fix="Leave it out of tp_batch_sharded.",
            )
        )

    def __repr__(self) -> str:
        return "input: batch-sharded"


def _each(value: Any, function: Any) -> Any:
    """A tensor, or each of a tuple, put through a function."""
    if isinstance(value, tuple):
        return tuple(_each(each, function) for each in value)
    return function(value) if isinstance(value, Tensor) else value


class BatchGather(BatchBlock, GatherMixin):
    """Around a block that computes locally on all samples: join those of all ranks (all-gather; backward:
    reduce-scatter), sum the output and keep this rank's own (reduce-scatter; backward: all-gather).
    """

    @property
    def around_whole(self) -> BatchWhole:
        """See `RegionBlock.around_whole`."""
        return BatchWhole()


class BatchWhole(BatchBlock, WholeMixin):
    """Around a block that makes a whole output of a whole input: join the samples of all ranks (all-gather; backward:
    own slice), keep this rank's own of the output (backward: all-gather).
    """


class BatchColwise(ColwiseParallel):
    """`colwise_rep`, or an embedding that is cut along the hidden size, on the samples of all ranks.

    Samples are joined (all-gather; backward: reduce-scatter), features of this rank computed, and exchanged for all
    features of its own samples (all-to-all; backward: all-to-all).
    """

    splits_batch = True
    batch: Batch | None = None

    def __init__(self, name: str) -> None:
        """`name`: what a plan calls the strategy that it is."""
        super().__init__(output_layouts=Replicate())
        self.plain = name

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        strategy, x = mod.tp_strategy, to_local(inputs)[0]
        assert isinstance(strategy, BatchColwise)
        strategy.batch = batch_of(x, device_mesh)
        if not strategy.is_embedding:
            strategy.check_width(x, strategy.in_features)
        if strategy.batch is None:
            return ColwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        return (_joined(x, strategy.batch, device_mesh), *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        strategy = mod.tp_strategy
        assert isinstance(strategy, BatchColwise)
        batch, strategy.batch = strategy.batch, None
        if batch is None:
            return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        own = exchange_regions(outputs, strategy.output_split.widths, batch.widths, device_mesh.get_group())
        return scale_gradient(own, 1 / device_mesh.size())

    def interrupted(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.interrupted`."""
        module.tp_strategy.batch = None  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"{self.plain}, input: batch-sharded"


class BatchVocabulary(RowwiseParallel):
    """`embedding_rowwise` on the samples of all ranks: ids are joined (all-gather), rows looked up, and summed for each
    rank's own samples (reduce-scatter; backward: all-gather).
    """

    splits_batch = True
    batch: Batch | None = None

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        strategy, ids = mod.tp_strategy, to_local(inputs)[0]
        assert isinstance(strategy, BatchVocabulary)
        strategy.batch = batch_of(ids, device_mesh)
        if strategy.batch is not None:
            ids = _joined(ids, strategy.batch, device_mesh)
        return RowwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, (ids, *inputs[1:]), device_mesh
        )

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        strategy = mod.tp_strategy
        assert isinstance(strategy, BatchVocabulary)
        batch, strategy.batch = strategy.batch, None
        if batch is None:
            return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        outputs = outputs.masked_fill(mod.__dict__.pop("_tp_outside").unsqueeze(LAST), 0)
        own = reduce_scatter_from_region(outputs, batch.widths, device_mesh.get_group(), dim=BATCH)
        return scale_gradient(own, 1 / device_mesh.size())

    def interrupted(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.interrupted`."""
        module.tp_strategy.batch = None  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return "embedding_rowwise, input: batch-sharded"


def _joined(x: Tensor, batch: Batch, mesh: DeviceMesh) -> Tensor:
    if not x.is_floating_point():
        return all_gather_uneven(x, batch.widths, mesh.get_group(), dim=BATCH)
    x = scale_gradient(x, mesh.size())
    return gather_to_region(x, batch.widths, mesh.get_group(), dim=BATCH)


BATCH_SHARDED: Mapping[str, TensorParallelLayer] = {
    **{name: BatchColwise(name) for name in ("colwise_rep", "colwise_gather_output", "embedding_colwise")},
    "embedding_rowwise": BatchVocabulary(),
}
"""What a strategy of one module becomes where its input is batch-sharded."""
