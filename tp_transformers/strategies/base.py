"""The contract of a strategy, `TensorParallelLayer`: `split_dim` or `partition_tensor`, `check`, `adapter`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..anatomy import holds_experts
from ..errors import PlanError
from ..marks import Mark
from ..ranks import direct
from ..ranks.group import TensorParallelGroup
from ..ranks.mesh import join
from ..slices.layout import Layout, Ranks, Split, chunked, packed
from .forward.attach import attach
from .forward.communication import Communication
from .shards.shard import ParamShard, layout_of
from .shards.slicing import part_lengths, take, traced_layout
from .signature import BATCH, PARTIAL, Placements, only

EXPERT_UNIT = 8
"""Block of an expert's features that is not split: torch's grouped matmul needs row strides that are multiples of 16
bytes, as 8 features are in every floating-point dtype of 2 bytes or more."""


class TensorParallelLayer(Communication, ParallelStyle):
    """Strategy: how one module (or parameter) is sharded over the ranks, and the communication of its forward.

    A custom strategy is a subclass. To shard parameters, implement `split_dim` (shard a dim evenly or by heads) or
    `partition_tensor` (any slice along one dim). To communicate, implement `before` and `after` the module's forward
    (or their static forms); in between, the module computes with this rank's local tensors (or with DTensor parameters,
    if `before` returned a DTensor). Plans, checks and commands read only the attributes below and those of
    `Communication`.

    One instance is a template; every module that a rule matches gets its own bound copy. It is a torch style too:
    `torch.distributed.tensor.parallel.parallelize_module` applies it to unsharded modules of any model.
    """

    added_once: tuple[str, ...] = ()
    """Replicated parameters that only rank 0 adds to outputs that are summed over the ranks."""
    heeds: tuple[str, ...] = ("use_dtensor",)
    """Arguments by which a class of this package communicates."""
    keeps_order = False
    """True if its results, and the sums over its parameters' gradients, have the order of one process."""
    shards_as_torch = False
    """True for a style of another library: it shards modules only, in torch.chunk's sizes, without regard to heads, and
    its module gets DTensors."""
    applied_by_torch = False
    """True under torch's `parallelize_module`: shards have torch.chunk's sizes, which a placement describes, unless
    the strategy has shares, parts or a unit."""
    parts: int | Sequence[int | str] | None = None
    """Number of equal parts of a fused projection, or their lengths; each part is sharded separately."""

    use_dtensor = True
    split: Split | None = None
    unit: int | None = None
    is_embedding = False
    holds_experts = False
    config: Any = None
    # As class attributes, for subclasses that do not call `super().__init__`.

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        output_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        use_local_output: bool | None = None,
        use_dtensor: bool | None = None,
    ) -> None:
        """Set the attributes of these names; a subclass may also set them by itself, on the class or an instance.

        Raises PlanError if the class is one of this package that communicates in its own way.

        Args:
            input_layouts: placements of the inputs as they arrive.
            output_layouts: placements of the outputs.
            desired_input_layouts: placements of the inputs in the module's forward.
            use_local_output: whether outputs are plain tensors (default) rather than DTensors.
            use_dtensor: whether sharded parameters become DTensors (default) where a placement describes their shard.
        """
        given = {
            "input_layouts": input_layouts,
            "output_layouts": output_layouts,
            "desired_input_layouts": desired_input_layouts,
            "use_local_output": use_local_output,
            "use_dtensor": use_dtensor,
        }
        given = {name: value for name, value in given.items() if value is not None}
        ignored = {name: value for name, value in given.items() if name not in self.heeds and value is not True}
        if ignored and type(self).__init__ is TensorParallelLayer.__init__ and self.is_built_in:
            raise PlanError(
                f"{', '.join(ignored)} of {type(self).__name__}",
                got=", ".join(map(str, ignored.values())),
                expected="no such argument: the strategy has one way to communicate",
                fix="Use ColwiseParallel, RowwiseParallel, or a subclass with `before` and `after`.",
            )
        for name, value in given.items():
            setattr(self, name, value)
        self.check_layouts()

    def check_layouts(self) -> None:
        """Raise PlanError if the layouts are none of the strategy."""

    def bind(
        self,
        module: nn.Module,
        size: int,
        *,
        name: str = "the module",
        ranks: Ranks | None = None,
        split: Split | None = None,
        parts: int | Sequence[int | str] | None = None,
        unit: int | None = None,
        widths: Sequence[str] = (),
        config: Any = None,
    ) -> TensorParallelLayer:
        """Return a copy bound to `module`, with `name` in messages, on `size` ranks.

        `split` counts heads; a head covers an equal number of indices. Without it, each of `parts` is split by the
        shares in `ranks`, or evenly, in blocks of `unit`. `widths` are attributes of the module that are split so in
        its forward. `config` is the config of the module, maybe a sub-config of the model's.
        """
        bound = copy.copy(self)
        bound.signature = self.signature.__get__(self)  # completed once, also if the instance declares it
        bound.name = name
        bound.split = split
        bound.ranks = ranks or Ranks(size)
        bound.config = config
        bound.widths = {key: vars(module)[key] for key in widths if key in vars(module)}
        bound._splits = {}
        if parts is not None:
            bound.parts = parts
        if unit is not None:
            bound.unit = unit
        bound.is_embedding = isinstance(module, nn.Embedding)
        bound.holds_experts = holds_experts(module)
        return bound

    def with_shares(self, shares: Sequence[float]) -> TensorParallelLayer:
        """Return a copy that splits by the `shares` of the ranks, for torch's `parallelize_module` on as many ranks.

        Raises ValueError unless they are positive and finite.
        """
        style = copy.copy(self)
        style.ranks = Ranks.of(shares)
        return style

    def check(self, module: nn.Module) -> None:
        """Raise ValueError with the reason if the strategy does not fit the module that a rule matches."""

    def applies_to(self, module: object) -> bool:
        """False for an `nn.Identity` in place of a module that the config leaves out; an optional rule skips it."""
        return not isinstance(module, nn.Identity)

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The sharded dim of the module's parameter `param_type` ("weight", ...); None if it is replicated.

        Raises ValueError if the strategy cannot shard such a parameter.
        """
        return None

    @property
    def slices_itself(self) -> bool:
        """True if a subclass overrides `partition_tensor`: `split_length` may then be another split."""
        return type(self).partition_tensor is not TensorParallelLayer.partition_tensor

    def layout(self, param_type: str, shape: Sequence[int], size: int) -> Layout | None:
        """The layout of the parameter `param_type` of `shape` over `size` ranks; None if it is replicated.

        A `partition_tensor` that a subclass overrides is called for every rank, with a tensor without data.
        Raises ValueError if the bound split or parts do not fit the shape.
        """
        if self.slices_itself:
            return traced_layout(self.partition_tensor, param_type, shape, size)
        return self._layout(param_type, shape, size)

    def _layout(self, param_type: str, shape: Sequence[int], size: int) -> Layout | None:
        dim = self.split_dim(param_type, len(shape))
        if dim is None:
            return None
        dim %= len(shape)
        # Grouped matmuls need blocks of the experts' features, not of the experts (dim 0).
        unit = self.unit or (EXPERT_UNIT if self.holds_experts and dim > 0 else 1)
        try:
            return Layout(dim, self.split_length(shape[dim], size, unit))
        except ValueError as error:
            raise ValueError(f"{param_type} along dim {dim}: {error}") from None

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """This rank's shard of the parameter `param_type` of `shape`."""
        layout = self.layout(param_type, shape, group.size)
        return ParamShard(
            shape,
            layout,
            group,
            use_dtensor=self.use_dtensor and layout is not None,
            sums_gradients=self.signature.gradient is PARTIAL and layout is None,
            added_once=param_type in self.added_once and layout is None,
            keeps_order=self.keeps_order,
        )

    def split_length(self, length: int, size: int, unit: int = 1) -> Split:
        """Split `length` over `size` ranks: by heads, by parts, by the bound shares or evenly in blocks of `unit`.

        Raises ValueError if it is not a number of complete heads or the sum of the parts, or if there are shares for
        another number of ranks.
        """
        key = (length, size, unit)
        if key not in self._splits:
            self._splits = {**self._splits, key: self._split_length(length, self._bound_ranks(size), unit)}
        return self._splits[key]

    def _bound_ranks(self, size: int) -> Ranks:
        """The bound ranks, if they are `size`; else `size`. Raises ValueError if shares would get lost."""
        if self.size != size and self.ranks.shares is not None:
            raise ValueError(f"its shares are for {self.size} ranks, not for {size}")
        return self.ranks if self.size == size else Ranks(size)

    def _split_length(self, length: int, ranks: Ranks, unit: int) -> Split:
        if self.split is None:
            return packed([self.split_part(part, ranks, unit) for part in part_lengths(length, self.parts)])
        if not self.split.length or length % self.split.length:
            raise ValueError(f"its {length} features are not {self.split.length} complete heads")
        return self.split.scaled(length // self.split.length)

    def split_part(self, length: int, ranks: Ranks, unit: int = 1) -> Split:
        """Split of one part of a fused projection, or of all features, in blocks of `unit` that stay on one rank."""
        return ranks.split(length, unit=unit) if unit > 1 or self.parts else self.evenly(length, ranks)

    def evenly(self, length: int, ranks: Ranks) -> Split:
        """Split of features that are no heads and no parts, such as those along the other dim of a packed weight."""
        is_chunked = self.applied_by_torch and ranks.shares is None
        return chunked(length, ranks.size) if is_chunked else ranks.split(length)

    def partition_tensor(
        self,
        param: Tensor,
        empty_param: Tensor,
        param_type: str,
        param_casting_dtype: torch.dtype | None,
        to_contiguous: bool,
        rank: int,
        device_mesh: DeviceMesh | None,
    ) -> Tensor:
        """Return this rank's shard of a parameter: a slice of it, plain or in a DTensor or an `nn.Parameter`.

        A load does not call it with values: it is called before, once for each rank, with a tensor without data. The
        rank then reads the returned slice.

        Args:
            param: the unsharded parameter.
            empty_param: meta tensor of the unsharded shape.
            param_type: name of the parameter within its module, such as "weight".
            param_casting_dtype: dtype to cast to; None to keep. The load casts to the model's dtype.
            to_contiguous: whether a shard that is a view is made contiguous.
            rank: this process on the `tp` axis.
            device_mesh: the 1-D mesh of the `tp` axis, maybe without process groups; None for one process.
        """
        size = device_mesh.size() if device_mesh is not None else 1
        shard = take(param, self._layout(param_type, empty_param.shape, size), rank)
        if param_casting_dtype is not None:
            shard = shard.to(param_casting_dtype)
        return shard.contiguous() if to_contiguous else shard

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the unsharded parameters of `module` on all ranks, from `src_data_rank`; see `parallelize_module`.

        Raises PlanError if the strategy does not fit the module, or if the module is sharded already.
        """
        group, name, params = join(device_mesh), type(module).__name__, dict(module.named_parameters(recurse=False))
        with group.agree():
            try:
                ranks, config = self._bound_ranks(group.size), getattr(module, "config", None)
                bound = self.bind(module, group.size, name=name, ranks=ranks, config=config)
                bound.applied_by_torch = True
                bound.check(module)
                for param_type, param in params.items():
                    layout, tied = bound.layout(param_type, param.shape, group.size), vars(param).get("tp_sharded")
                    if tied is not None and tied.tp_shard.layout != layout:
                        raise ValueError(f"its {param_type} is tied to one that is sharded otherwise")
                is_sharded = any(isinstance(param, DTensor) or layout_of(param) for param in params.values())
                if is_sharded or hasattr(module, "tp_strategy"):
                    raise ValueError("it is parallel already")
                if self.src_data_rank is not None and self.src_data_rank not in range(group.size):
                    raise ValueError(f"src_data_rank is {self.src_data_rank}, which is none of {group.size} ranks")
            except ValueError as error:
                raise PlanError(f"{self!r} does not fit a {name}: {error}") from error
        for param in params.values():
            vars(param).pop("tp_shard", None)  # of a replicated parameter of a model that was loaded with a plan
        shard_module(module, bound, group)
        return module

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """Strategies of the matrices A and B of a LoRA adapter on the module: A's input is the module's, B's output is
        added to the module's. Raises NotImplementedError if the strategy does not support adapters.
        """
        raise NotImplementedError

    @property
    def around_replicated(self) -> TensorParallelLayer | None:
        """Strategy of the module if its attention is replicated instead of sharded; None for `replicate`."""
        return None

    @property
    def is_built_in(self) -> bool:
        """True for a class of this package: its attributes describe all of its communication."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input={only(self.input_layouts)}, output={only(self.output_layouts)})"


def shard_module(module: nn.Module, strategy: TensorParallelLayer, group: TensorParallelGroup) -> None:
    """Shard the unsharded parameters of `module` by the bound `strategy`, and attach the strategy to its forward.

    Collective over the `tp` axis: all ranks get the values of the strategy's `src_data_rank`; if that is None, each
    keeps its own. Parameters on the meta device stay there.
    """
    mesh, shards = group.device_mesh, {}
    assert mesh is not None
    for name, param in list(module.named_parameters(recurse=False)):
        if hasattr(param, "tp_sharded"):  # tied to the parameter of another module
            module._parameters[name] = param.tp_sharded
        elif not hasattr(param, "tp_shard"):
            full = param.data if param.is_meta else param.data.to(group.device).contiguous()
            if not param.is_meta and strategy.src_data_rank is not None:
                direct.broadcast(full, mesh.get_group(), strategy.src_data_rank)
            shard = strategy.shard(name, param.shape, group)
            own = take(full, shard.layout, group.rank).clone()
            param.tp_sharded = module._parameters[name] = shard.wrap(own, requires_grad=param.requires_grad)  # type: ignore[attr-defined]
        shards[name] = module._parameters[name].tp_shard  # type: ignore[union-attr]
    attach(module, strategy, shards, mesh)


STRATEGY: Mark[TensorParallelLayer] = Mark("tp_strategy")
"""The strategy that is bound to a module, on the module."""


def batch_sharded(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of `model` that gather the samples of all ranks of its `tp` group."""
    for module in model.modules():
        strategy = STRATEGY.find(module)
        if strategy is not None and strategy.signature.takes is BATCH:
            yield module
