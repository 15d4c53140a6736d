"""Blocks, heads and embeddings that gather the samples of ranks with different batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ...model.dropout import drops, generator_of, next_seed, settings_of
from ...ranks import direct
from ...ranks.collectives import (
    Group,
    all_gather_number,
    all_gather_uneven,
    exchange_regions,
    gather_to_region,
    reduce_scatter_from_region,
)
from ...ranks.group import TensorParallelGroup
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import Forward, forward_of
from ...strategies.forward.block import Guard
from ...strategies.forward.communication import ShortForward
from ...strategies.linear import LAST, ColwiseParallel, RowwiseParallel
from ...strategies.local import to_local
from ...strategies.signature import BATCH, FEATURES, LOCAL, PARTIAL, REPLICATED, Signature
from ...torch_api import tree_map_only
from ..expert_parallel.exchange import ExchangeExpertsParallel
from ..sequence.region import GatherMixin, RegionBlock, Widths
from .batch import BATCH_DIM, SAME_INPUTS, Batch, batch_of, exchange_samples, scale_gradient


class BatchBlock(RegionBlock):
    """A block that computes on the samples of all ranks, between modules that compute on a rank's own samples."""

    dim, what = BATCH_DIM, "batch"
    remedy = "Leave it out of tp_batch_sharded."

    @property
    def around_replicated(self) -> BatchReplicated:
        """See `TensorParallelLayer.around_replicated`: the batch stays sharded."""
        return BatchReplicated()

    def input_widths(self, x: Tensor, mesh: DeviceMesh, forward: Forward) -> Widths | None:
        forward.notes["batch"] = batch = batch_of(x, mesh, in_layers=True)
        return None if batch is None else batch.widths

    def enter(self, x: Tensor, widths: Widths | None, group: Group, forward: Forward) -> Tensor:
        """See `RegionBlock.enter`; multiplies the gradient by the number of ranks: mean of losses -> own loss."""
        x = super().enter(x if widths is None else scale_gradient(x, group.size()), widths, group, forward)
        forward.notes["x"] = x
        return x

    def leave(self, x: Tensor, widths: Widths | None, group: Group) -> Tensor:
        """See `RegionBlock.leave`; divides the gradient by the number of ranks: own loss -> mean of losses."""
        x = super().leave(x, widths, group)
        return x if widths is None else scale_gradient(x, 1 / group.size())

    def prepare_arguments(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `TensorParallelLayer.prepare_arguments`: gathers all other arguments that have a batch dim."""
        notes = forward_of(module).notes
        x, batch = notes.pop("x"), notes["batch"]  # pop: no reference to x may remain
        if batch is None:
            return args, keywords

        def gather(name: str, value: Any) -> Any:
            """Gather the argument `name` over all ranks; return values without a batch dim as they are."""
            if value is x or not (isinstance(value, Tensor | tuple) or name == "attention_mask"):
                return value
            entries = batch.joined.setdefault(name, [])
            index = next(
                (number for number, (local, _) in enumerate(entries) if local is value and value is not None),
                len(entries),
            )
            if name == "attention_mask" and not batch.differs and value is None:
                return None
            if name == "attention_mask" and batch.differs:
                # transformers replaces a mask without effect by None, on each rank by itself.
                latest = torch.tensor([-1 if value is None else index], device=x.device)
                direct.all_reduce(latest, mesh.get_group(), direct.MAX)
                index = int(latest.item())
                if index < 0:
                    return None
            if index == len(entries):
                own = _full_mask(module, x) if value is None else value
                join = partial(self._gather_argument, name, batch, mesh)
                entries.append((value, tree_map_only(Tensor, join, own)))
            return entries[index][1]

        names = [*self.arguments, *[""] * len(args)]
        args = tuple(gather(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: gather(name, value) for name, value in keywords.items()}

    def _gather_argument(self, name: str, batch: Batch, mesh: DeviceMesh, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        self.check_fit(name, tensor.shape[0], batch.widths, mesh, broadcasts=True)
        tensor = tensor.expand(batch.widths[mesh.get_local_rank()], *tensor.shape[1:])
        if not tensor.requires_grad:
            return all_gather_uneven(tensor, batch.widths, mesh.get_group(), dim=BATCH_DIM)
        return self.join(scale_gradient(tensor, mesh.size()), batch.widths, mesh.get_group())

    def __repr__(self) -> str:
        return "input: batch-sharded"


def _full_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Return the mask equivalent to None: (1, length) for flash attention, else (1, 1, length, length)."""
    length = x.shape[1]
    if "flash" in str(getattr(getattr(module, "config", None), "_attn_implementation", None)):
        return torch.ones(1, length, dtype=torch.bool, device=x.device)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device)
    return mask.tril() if getattr(module, "is_causal", True) else mask


class BatchGather(BatchBlock, GatherMixin):
    """Around a block that computes locally on all samples: gather the input (all-gather; backward: reduce-scatter),
    sum the output and keep this rank's samples (reduce-scatter; backward: all-gather).
    """

    signature = Signature(BATCH, BATCH, inside=(REPLICATED, PARTIAL))


class BatchReplicated(BatchBlock):
    """Around a block with replicated input and output: gather the input (all-gather; backward: own slice), keep this
    rank's samples of the output (backward: all-gather).
    """

    signature = Signature(BATCH, BATCH, inside=(REPLICATED, REPLICATED))


class BatchColwise(ColwiseParallel):
    """`colwise_rep`, or an embedding that is sharded along the hidden size, on the samples of all ranks.

    Gathers the input (all-gather; backward: reduce-scatter), computes this rank's features, and exchanges them for all
    features of its own samples (all-to-all; backward: all-to-all).
    """

    signature = Signature(BATCH, BATCH, inside=(REPLICATED, FEATURES))

    def short_forward(self) -> ShortForward | None:
        return None

    def __init__(self, name: str) -> None:
        """`name`: the name of the strategy in a plan."""
        super().__init__(output_layouts=Replicate())
        self.plain = name

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = to_local(inputs)[0]
        batch = forward_of(module).notes["batch"] = batch_of(x, mesh)
        if not self.is_embedding:
            self.check_width(x, self.in_features)
        if batch is None:
            return super().before(module, inputs, mesh)
        return (_gather(x, batch, mesh), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        batch = forward_of(module).notes["batch"]
        if batch is None:
            return super().after(module, outputs, mesh)
        local = exchange_regions(outputs, self.output_split.widths, batch.widths, mesh.get_group())
        return scale_gradient(local, 1 / mesh.size())

    def __repr__(self) -> str:
        return f"{self.plain}, input: batch-sharded"


class BatchVocabulary(RowwiseParallel):
    """`embedding_rowwise` on the samples of all ranks: gather the ids (all-gather), look up rows, sum them for each
    rank's own samples (reduce-scatter; backward: all-gather).
    """

    signature = Signature(BATCH, BATCH, inside=(REPLICATED, PARTIAL))

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        ids = to_local(inputs)[0]
        batch = forward_of(module).notes["batch"] = batch_of(ids, mesh)
        if batch is not None:
            ids = _gather(ids, batch, mesh)
        return super().before(module, (ids, *inputs[1:]), mesh)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        batch = forward_of(module).notes["batch"]
        if batch is None:
            return super().after(module, outputs, mesh)
        outputs = outputs.masked_fill(forward_of(module).notes["outside"].unsqueeze(LAST), 0)
        local = reduce_scatter_from_region(outputs, batch.widths, mesh.get_group(), dim=BATCH_DIM)
        return scale_gradient(local, 1 / mesh.size())

    def __repr__(self) -> str:
        return "embedding_rowwise, input: batch-sharded"


class BatchExpertsParallel(ExchangeExpertsParallel):
    """Experts with the tokens of each rank's own samples. See `batch.py` for the scale of gradients."""

    signature = Signature(BATCH, BATCH, inside=(LOCAL, PARTIAL))

    def has_own_tokens(self, states: Tensor, mesh: DeviceMesh) -> bool:
        return exchange_samples(mesh.get_group())

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if not SAME_INPUTS.get():
            states, ids, weights, *others = inputs
            inputs = (scale_gradient(states, mesh.size()), ids, scale_gradient(weights, mesh.size()), *others)
        return super().before(module, inputs, mesh)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        has_own_tokens = forward_of(module).notes["route"] is not None
        return super().after(module, scale_gradient(outputs, 1 / mesh.size()) if has_own_tokens else outputs, mesh)

    def __repr__(self) -> str:
        return "moe_all_to_all, input: batch-sharded"


def _gather(x: Tensor, batch: Batch, mesh: DeviceMesh) -> Tensor:
    if not x.is_floating_point():
        return all_gather_uneven(x, batch.widths, mesh.get_group(), dim=BATCH_DIM)
    x = scale_gradient(x, mesh.size())
    return gather_to_region(x, batch.widths, mesh.get_group(), dim=BATCH_DIM)


BATCH_SHARDED: Mapping[str, TensorParallelLayer] = {
    **{name: BatchColwise(name) for name in ("colwise_rep", "colwise_gather_output", "embedding_colwise")},
    "embedding_rowwise": BatchVocabulary(),
    "moe_all_to_all": BatchExpertsParallel(),
}
"""{strategy of a module: the strategy that replaces it if the module's input is batch-sharded}."""


class SharedRandomness(Guard):
    """Guard of a block that computes on the samples of all: ranks draw the same numbers in it, outside their own."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.own: Tensor | None = None
        """The state of this rank, while it draws from the shared one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRandomness:
        return type(self)(self.group)

    def begin(self, module: nn.Module) -> None:
        """Before the module: if it drops anything, use the first rank's next number as the seed (one all-gather)."""
        self.leave()
        if module.training and any(drops(inner, settings_of(inner)) for inner in module.modules()):
            device, process_group = self.group.device, self.group.process_group
            assert process_group is not None
            seeds = all_gather_number(next_seed(device), process_group, device)
            self.own = generator_of(device).get_state()
            generator_of(device).manual_seed(seeds[0])

    def leave(self, *_: Any) -> None:
        """Switch back to the state of this rank."""
        if self.own is not None:
            generator_of(self.group.device).set_state(self.own)
            self.own = None
