"""Column- and row-parallel layers (Megatron-LM, Shoeybi et al. 2019, section 3), for linears and embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import pad

from ..anatomy import embeds_states, features, is_transposed
from ..errors import PlanError
from ..ranks.collectives import (
    copy_to_region,
    exchange_regions,
    gather_from_region,
    gather_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from ..ranks.group import TensorParallelGroup
from ..slices.layout import Layout, Split, chunked
from .base import TensorParallelLayer
from .forward.attach import forward_of
from .forward.communication import ShortForward, as_sharded
from .replicate import ReplicateParallel
from .shards.shard import ParamShard
from .shards.slicing import own_rows, take
from .signature import FEATURES, PARTIAL, REPLICATED, Placements, Signature, only

LAST = -1
"""The feature dim of activations: (..., features)."""


class _WeightParallel(TensorParallelLayer):
    """Base of column- and row-parallel layers: shard a weight along its input or output features.

    `input_layouts` are Replicate(), Shard(dim) or Partial(), of plain inputs; shards along a dim other than the
    features have one length. A DTensor has a layout already. Default of embeddings: Replicate(). `output_layouts` are
    Replicate() or Shard(dim), in shards as of torch.chunk along a dim other than the features. Other layouts raise
    PlanError.
    """

    heeds: tuple[str, ...] = ("input_layouts", "output_layouts", "use_local_output", "use_dtensor")
    is_transposed = False
    """True if the weight is (in, out), as in GPT-2's Conv1D."""
    in_features = 0
    """Input features of the unsharded module: the rows of an embedding."""
    out_features = 0
    """Output features of the unsharded module."""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; reads the module's features once."""
        bound = super().bind(module, size, **options)
        assert isinstance(bound, _WeightParallel)
        bound.is_transposed = is_transposed(module)
        bound.in_features, bound.out_features = features(module) or (0, 0)
        if bound.is_embedding and "input_layouts" not in vars(self):
            bound.input_layouts = (Replicate(),)
        return bound

    def check_layouts(self) -> None:
        """Raise PlanError if the layouts are no placements of the inputs and outputs of such a layer."""
        for name, sums in (("input_layouts", " or Partial()"), ("output_layouts", "")):
            layouts = getattr(self, name)
            if name in vars(self) and isinstance(layouts, Placement):
                setattr(self, name, (layouts,))
            placement = layouts[0] if isinstance(layouts, tuple | list) and len(layouts) == 1 else layouts
            if type(placement) not in (Replicate, Shard) and not (sums and placement == Partial()):
                raise PlanError(
                    f"{name} of {type(self).__name__}",
                    got=str(layouts),
                    expected=f"Replicate(), Shard(dim){sums} of torch.distributed.tensor",
                    fix="A row-parallel layer that leaves partial sums is local_rowwise.",
                )

    def check(self, module: nn.Module) -> None:
        """Accept linears (weight: (out_features, in_features)), Conv1D, and embeddings without parts."""
        self.check_layouts()
        if features(module) is None:
            raise ValueError(f"a {type(module).__name__} is no linear or embedding, which colwise and rowwise shard")
        if self.parts is not None and self.is_embedding:
            raise ValueError("an embedding has no packed parts")
        if self.signature.leaves is FEATURES and self.use_local_output and embeds_states(module, self.config):
            raise ValueError(
                "it would leave each rank a shard of the hidden features, of which what follows takes all; use "
                "'embedding_rowwise' or 'embedding_colwise'"
            )

    def shortened(self, base: type[_WeightParallel], given: Any, left: Any) -> ShortForward | None:
        """`ShortForward(given, left)` where the strategy has the layouts and the methods of the class `base`."""
        if not self.is_built_in:
            return None
        takes = only(self.input_layouts) == only(base.input_layouts) and type(self).before is base.before
        leaves = only(self.output_layouts) == only(base.output_layouts) and type(self).after is base.after
        return ShortForward(given if takes else "before", left if leaves and self.use_local_output else "after")

    def all_of(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """The complete input: `x` itself (backward: all-reduce), or from a shard (all-gather; backward: reduce-scatter)
        or a summand (all-reduces).
        """
        if isinstance(x, DTensor):
            return x.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        placement = only(self.input_layouts)
        if isinstance(placement, Replicate):
            if not self.is_embedding:
                self.check_width(x, self.in_features)
            return self.copy(x, mesh) if x.requires_grad and torch.is_grad_enabled() else x
        group = mesh.get_group()
        if not isinstance(placement, Shard):
            return copy_to_region(reduce_from_region(x, group), group)
        dim = self.dim_of(placement, x)
        is_features = dim == x.ndim - 1 and not self.is_embedding
        widths = self.evenly(self.in_features, self.ranks).widths if is_features else (x.shape[dim],) * self.size
        return gather_to_region(x, widths, group, dim=dim)

    def dim_of(self, placement: Shard, x: Tensor) -> int:
        """The dim of `x` that the placement shards. Raises PlanError if `x` has no such dim."""
        if not -x.ndim <= placement.dim < x.ndim:
            raise PlanError(
                self.name,
                got=f"a tensor of {x.ndim} dims",
                expected=f"one for {placement}",
                fix="Choose another layout.",
            )
        return placement.dim % x.ndim

    def leaving(self, outputs: Tensor, mesh: DeviceMesh, dim: int = 0, split: Split | None = None) -> Tensor:
        """The outputs, replicated or sharded by `split` along `dim`, as a plain tensor or a DTensor."""
        if self.use_local_output:
            return outputs
        if split is None:
            return DTensor.from_local(outputs, mesh, [Replicate()], run_check=False)
        if not split.is_chunked:
            raise ValueError(
                f"no DTensor placement describes features split into {split.widths}; use use_local_output=True"
            )
        return as_sharded(outputs, dim, split.length, mesh)

    def check_width(self, x: Tensor, expected: int) -> None:
        """Raise PlanError, before any communication, if the input is not `expected` features wide."""
        if x.shape[LAST] != expected:
            raise PlanError(
                self.name,
                got=f"an input of {x.shape[LAST]} features",
                expected=str(expected),
                fix="The plan's rules for it and for what comes before it do not fit together: one side is sharded "
                "where the other expects all features.",
            )


class ColwiseParallel(_WeightParallel):
    """Shard the output features.

    A linear's `weight: (out/size, in)` and `bias: (out/size)`; an embedding's `weight: (vocab, hidden/size)`; dim -2 of
    a parameter that a plan names directly, such as experts of (experts, out, in).
    The input is replicated (backward: all-reduce), or gathered from `input_layouts` (backward: reduce-scatter). The
    output is `(..., out/size)`, or replicated with `output_layouts=Replicate()` (all-gather; backward: own slice), or
    sharded along another dim (all-to-all; backward: all-to-all).

        x ──f── [A | B] ── [xA | xB]
    """

    signature = Signature(inside=(REPLICATED, FEATURES))
    input_layouts: Placements = (Replicate(),)
    output_layouts: Placements = (Shard(LAST),)
    desired_input_layouts: Placements = (Replicate(),)

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The output features: dim -2 of a weight, the last dim of a bias; the hidden dim of an embedding."""
        is_bias = ndim == (2 if self.holds_experts else 1)
        return -1 if self.is_embedding or self.is_transposed or is_bias else -2

    @property
    def output_split(self) -> Split:
        """Split of the output features over the ranks."""
        return self.split_length(self.out_features, self.size)

    @property
    def sharded_output(self) -> Split | None:
        return self.output_split if self.signature.leaves is FEATURES else None

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: A is replicated, B is sharded like the layer."""
        layouts = only(self.input_layouts), only(self.output_layouts)
        if layouts not in ((Replicate(), Shard(LAST)), (Replicate(), Replicate())) or not self.use_local_output:
            raise NotImplementedError
        return ReplicateParallel(), ColwiseParallel(output_layouts=self.output_layouts)

    def short_forward(self) -> ShortForward | None:
        return self.shortened(ColwiseParallel, "copied", "as it is")

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The output width of a Conv1D."""
        return {"nf": self.output_split.widths[rank]} if self.is_transposed else {}

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (self.all_of(inputs[0], mesh), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        placement, split, group = only(self.output_layouts), self.output_split, mesh.get_group()
        if not isinstance(placement, Shard):
            return self.leaving(gather_from_region(outputs, split.widths, group), mesh)
        dim = self.dim_of(placement, outputs)
        if dim < outputs.ndim - 1:
            of_features, split = split, chunked(outputs.shape[dim], self.size)
            outputs = exchange_regions(outputs, of_features.widths, split.widths, group, into=dim)
        return self.leaving(outputs, mesh, dim, split)


class RowwiseParallel(_WeightParallel):
    """Shard the input features.

    A linear's `weight: (out, in/size)`, with a replicated bias that is added once, after the sum; an embedding's
    `weight: (vocab/size, hidden)`, looked up by the rank that holds the row; dim -1 of a parameter that a plan names
    directly, such as experts of (experts, out, in). The input is `(..., in/size)`, or replicated with
    `input_layouts=Replicate()` (own slice; backward: all-gather), or sharded along another dim (all-to-all; backward:
    all-to-all). The output is summed over the ranks (all-reduce; backward: identity), or sharded with `output_layouts`
    (reduce-scatter; backward: all-gather).

        [x | y] ── [A / B] ── xA + yB ──g── replicated
    """

    signature = Signature(inside=(FEATURES, PARTIAL))
    hidden: tuple[str, ...] = ("bias",)
    input_layouts: Placements = (Shard(LAST),)
    output_layouts: Placements = (Replicate(),)
    desired_input_layouts: Placements = (Shard(LAST),)

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The input features: the last dim of a weight, the rows of an embedding; a bias is replicated."""
        if self.is_embedding:
            return 0
        if ndim == 1:
            return None
        return -2 if self.is_transposed else -1

    def check(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.check`; an embedding must have a weight only: its ids become local row indices."""
        super().check(module)
        if self.is_embedding and len(own := dict(module.named_parameters(recurse=False))) > 1:
            extra = ", ".join(name for name in own if name != "weight")
            raise ValueError(f"an embedding with {extra} beside its weight may use ids in another way; replicate it")

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """See `TensorParallelLayer.shard`; under torch's `parallelize_module` the bias is a DTensor, too."""
        shard = super().shard(param_type, shape, group)
        return replace(shard, use_dtensor=self.use_dtensor) if self.applied_by_torch else shard

    @property
    def input_split(self) -> Split:
        """Split of the input features, or of the rows of an embedding, over the ranks."""
        return self.split_length(self.in_features, self.size)

    @property
    def sharded_input(self) -> Split | None:
        return self.input_split if self.signature.takes is FEATURES else None

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: A is sharded like the layer, B is replicated."""
        layouts = only(self.input_layouts), only(self.output_layouts)
        if layouts not in ((Shard(LAST), Replicate()), (Replicate(), Replicate())) or not self.use_local_output:
            raise NotImplementedError
        return RowwiseParallel(input_layouts=self.input_layouts), ReplicateParallel()

    def short_forward(self) -> ShortForward | None:
        return self.shortened(RowwiseParallel, "as it is", "summed")

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """An embedding's `padding_idx`, as an index of the local rows."""
        if not isinstance(module, nn.Embedding) or module.padding_idx is None:
            return {}
        start, stop = self.input_split.ranges[rank][0]
        inside = start <= module.padding_idx < stop
        return {"padding_idx": module.padding_idx - start if inside else None}

    def local_parameters(self, module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Tensor | None]:
        """A Conv1D needs a bias, and gets a zero; an embedding without rows gets one, and its output is masked."""
        local, bias = super().local_parameters(module, views), module._parameters.get("bias")
        if self.is_transposed and bias is not None and "bias" in self.hidden:
            local["bias"] = torch.zeros(1, dtype=bias.dtype, device=bias.device)
        if self.is_embedding and not self.input_split.widths[self.rank]:
            assert local["weight"] is not None
            local["weight"] = pad(local["weight"], (0, 0, 0, 1))  # of the shard: all ranks need a gradient, or none
        return local

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, placement = inputs[0], only(self.input_layouts)
        if self.is_embedding:
            x, forward_of(module).notes["outside"] = own_rows(self.all_of(x, mesh), self.input_split, self.rank)
        elif isinstance(x, DTensor):
            self.check_width(x, self.in_features)
            if self.input_split.is_chunked:
                x = x.redistribute(mesh, [Shard(x.ndim - 1)]).to_local()
            else:  # no placement describes the split
                x = take(self.all_of(x, mesh), Layout(x.ndim - 1, self.input_split), self.rank)
        elif isinstance(placement, Shard) and self.dim_of(placement, x) == x.ndim - 1:
            self.check_width(x, self.input_split.widths[self.rank])
        else:
            self.check_width(x, self.in_features)
            widths, group = self.input_split.widths, mesh.get_group()
            if isinstance(placement, Shard):
                lengths = (x.shape[placement.dim],) * self.size
                x = exchange_regions(x, lengths, widths, group, dim=placement.dim, into=LAST)
            else:
                is_sum = isinstance(placement, Partial)
                x = (reduce_scatter_from_region if is_sum else scatter_to_region)(x, widths, group)
        return (x, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self.is_embedding:  # sums with -0.0 keep the sign of a zero
            outputs = outputs.masked_fill(forward_of(module).notes["outside"].unsqueeze(LAST), -0.0)
        bias = module._parameters.get("bias")
        placement = only(self.output_layouts)
        if isinstance(placement, Shard):
            dim, group = self.dim_of(placement, outputs), mesh.get_group()
            is_last, length = dim == outputs.ndim - 1, outputs.shape[dim]
            split = self.evenly(length, self.ranks) if is_last else chunked(length, self.size)
            outputs = reduce_scatter_from_region(outputs, split.widths, group, dim=dim)
            if bias is not None:
                if isinstance(bias, DTensor):  # whose gradient may be partial sums
                    full = bias.to_local(grad_placements=[Partial()])
                else:
                    full = copy_to_region(bias, group)
                outputs = outputs + (full.split(split.widths)[self.rank] if is_last else full)
            return self.leaving(outputs, mesh, dim, split)
        is_own = self.asks_block or not torch.is_grad_enabled()
        outputs = reduce_from_region(outputs, self.group_of(mesh), in_place=is_own)
        if bias is not None:
            outputs = outputs + (bias.to_local() if isinstance(bias, DTensor) else bias)
        return self.leaving(outputs, mesh)


class _PackedParallel(_WeightParallel):
    """A fused projection: each of its parts is sharded."""

    def __init__(self, *, parts: int | Sequence[int] = 2, use_dtensor: bool = True) -> None:
        """`parts`: the number of equal parts, or their lengths; overridden by a plan's `parts`."""
        super().__init__(use_dtensor=use_dtensor)
        self.parts = parts


class PackedColwiseParallel(_PackedParallel, ColwiseParallel):
    """Shard each part of a fused projection's output features: `AABB -> [AB, AB]`, without a gather."""


class PackedRowwiseParallel(_PackedParallel, RowwiseParallel):
    """Shard each part of a fused projection's input features: `AABB -> [AB, AB]`; sum the outputs."""
