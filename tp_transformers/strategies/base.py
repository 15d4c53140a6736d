"""The contract of a strategy, and how it is attached to a module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..anatomy.linears import holds_experts
from ..errors import PlanError
from ..ranks.group import TensorParallelGroup
from ..ranks.mesh import join
from ..slices.layout import Layout, Split, even, packed
from ..slices.lazy import LazyTensor
from .attach import cut_module
from .shard import ParamShard, shard_of, take, undo_partition
from .trace import traced_layout

Placements = Sequence[Placement] | Placement | None

EXPERT_UNIT = 8
"""Features of an expert that stay together: torch's grouped matmul wants row strides that are multiples of 16 bytes,
which 8 features are in every floating-point dtype of 2 bytes or more."""


class TensorParallelLayer(ParallelStyle):
    """How one module (or parameter) is split, and what its forward has to communicate.

    A strategy of your own is a subclass. To cut parameters, implement `split_dim` (cut along a dim, evenly or by heads)
    or `partition_tensor` (cut in your own way). To communicate, implement `_prepare_input_fn` and `_prepare_output_fn`,
    which run before and after the module's forward; in between, the module computes with this rank's local tensors (or
    with DTensor parameters, if `_prepare_input_fn` returned a DTensor).

    One instance serves as a template; every module that a rule matches gets its own copy, bound to it.

    It is a style of torch too, so that `torch.distributed.tensor.parallel.parallelize_module` can apply it to a part of
    any model whose parameters are whole.
    """

    hidden: tuple[str, ...] = ()
    """Parameters that the local forward must not see (a bias that may be added only once)."""
    added_once: tuple[str, ...] = ()
    """Parameters that every rank holds whole, and that only rank 0 adds to outputs that are summed over the ranks."""
    sums_gradients: bool = False
    """Whether every rank has only a part of the gradient of parameters that it holds whole (backward: all-reduce)."""
    sums_output: bool = False
    """Whether outputs are summed over the ranks, so that a parameter that all of them hold whole would count twice."""
    leaves_partial_output: bool = False
    """Whether outputs are parts of a sum over the ranks, which something around the module has to add up."""
    cuts_sequence = False
    """Whether what follows computes on this rank's part of the sequence."""
    splits_batch = False
    """Whether the module takes samples of each rank's own, and computes on those of all ranks."""
    wraps_whole = False
    """Whether a parameter that every rank holds whole is a replicated DTensor, for a module that is given DTensors."""
    parts: int | Sequence[int | str] | None = None
    """Of a fused projection: how many equal parts, or their lengths; each is cut by itself."""

    arguments: tuple[str, ...] = ()
    """Names of the arguments of the module's forward that can be given by position, once it is attached."""

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        output_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        use_local_output: bool = True,
        use_dtensor: bool = True,
    ) -> None:
        """Describe the activations on both sides, as DTensor placements.

        Args:
            input_layouts: how the inputs arrive.
            output_layouts: how the outputs leave.
            desired_input_layouts: how the module needs its inputs.
            use_local_output: whether outputs are plain tensors rather than DTensors.
            use_dtensor: whether parameters that are cut become DTensors where a placement describes their shard.
        """
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.desired_input_layouts = desired_input_layouts
        self.use_local_output = use_local_output
        self.use_dtensor = use_dtensor
        self.split: Split | None = None
        self.unit: int | None = None
        self.widths: dict[str, int] = {}
        self.size = 1
        self.is_embedding = False
        self.holds_experts = False
        self.config: Any = None
        self.name = "the module"
        self._splits: dict[tuple[int, int, int], Split] = {}

    def bind(
        self,
        module: nn.Module,
        size: int,
        *,
        name: str = "the module",
        split: Split | None = None,
        parts: int | Sequence[int | str] | None = None,
        unit: int | None = None,
        widths: Sequence[str] = (),
        config: Any = None,
    ) -> TensorParallelLayer:
        """A copy for `module`, called `name` in messages, on `size` ranks.

        It cuts by `split` (heads, each of which stands for as many indices as the length has for one) where given, else
        each of `parts` evenly, in blocks of `unit`. `widths` are attributes of the module that are cut evenly in its
        forward. `config` is the one that counts for the module.
        """
        bound = copy.copy(self)
        bound.name = name
        bound.split = split
        bound.size = size
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

    def check(self, module: nn.Module) -> None:
        """Raise ValueError, saying why, where the strategy does not fit the module that a rule gives it."""

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The dim along which the module's parameter `param_type` ("weight", ...) is cut; None if it stays whole.

        Raises ValueError where the strategy cannot cut such a parameter.
        """
        return None

    def layout(self, param_type: str, shape: Sequence[int], size: int) -> Layout | None:
        """Who holds what of the parameter `param_type` of `shape` over `size` ranks; None where all hold the whole.

        Where a subclass implements `partition_tensor`, that is asked for every rank, with a tensor that has no data.
        Raises ValueError where the bound split or parts do not fit the shape.
        """
        if type(self).partition_tensor is not TensorParallelLayer.partition_tensor:
            return traced_layout(self.partition_tensor, param_type, shape, size)
        dim = self.split_dim(param_type, len(shape))
        if dim is None:
            return None
        dim %= len(shape)
        # Only what is multiplied in groups needs its width in units: the experts' features, not the experts.
        unit = self.unit or (EXPERT_UNIT if self.holds_experts and dim > 0 else 1)
        try:
            return Layout(dim, self.cut(shape[dim], size, unit))
        except ValueError as error:
            raise ValueError(f"{param_type} along dim {dim}: {error}") from None

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """What this rank holds of the parameter `param_type` of `shape`."""
        layout = self.layout(param_type, shape, group.size)
        whole = layout is None
        return ParamShard(
            shape,
            layout,
            group,
            self.use_dtensor and (self.wraps_whole or not whole),
            self.sums_gradients and whole,
            param_type in self.added_once and whole,
        )

    def cut(self, length: int, size: int, unit: int = 1) -> Split:
        """`length` cut over `size` ranks: by heads, part by part, or evenly in blocks of `unit`.

        Raises ValueError where it is not made up of whole heads or of the parts.
        """
        if (length, size, unit) not in self._splits:
            self._splits[length, size, unit] = self._cut(length, size, unit)
        return self._splits[length, size, unit]

    def _cut(self, length: int, size: int, unit: int) -> Split:
        if self.split is not None:
            if not self.split.length or length % self.split.length:
                raise ValueError(f"its {length} features are not {self.split.length} whole heads")
            return self.split.scaled(length // self.split.length)
        if self.parts is None:
            return even(length, size, unit=unit)
        if isinstance(self.parts, int):
            if self.parts < 1 or length % self.parts:
                raise ValueError(f"{length} features are not {self.parts} equal parts")
            return packed([even(length // self.parts, size, unit=unit)] * self.parts)
        lengths = [part for part in self.parts if isinstance(part, int) and part > 0]
        if not lengths or len(lengths) < len(self.parts):
            raise ValueError(f"parts {list(self.parts)} are not lengths, and no attention gives their heads")
        if sum(lengths) != length:
            raise ValueError(f"it has length {length}, its parts add up to {sum(lengths)}")
        return packed([even(part, size, unit=unit) for part in lengths])

    def partition_tensor(
        self,
        param: Tensor | LazyTensor,
        empty_param: Tensor,
        param_type: str,
        param_casting_dtype: torch.dtype | None,
        to_contiguous: bool,
        rank: int,
        device_mesh: DeviceMesh | None,
    ) -> Tensor | LazyTensor:
        """This rank's shard of a parameter.

        Args:
            param: the whole parameter, or a lazy tensor of which only the slice that is returned will be read.
            empty_param: meta tensor of the whole shape.
            param_type: name of the parameter within its module, such as "weight".
            param_casting_dtype: dtype to cast to; None to keep. The loader casts lazy shards itself.
            to_contiguous: whether a shard that is a view is made contiguous.
            rank: this process on the `tp` axis.
            device_mesh: the 1-D mesh of the `tp` axis; None for one process. Plans are checked before there are
                ranks: then it is a stand-in of which only `size()` can be asked.
        """
        size = device_mesh.size() if device_mesh is not None else 1
        shard = take(param, self.layout(param_type, empty_param.shape, size), rank)
        if isinstance(shard, LazyTensor):
            return shard
        if param_casting_dtype is not None:
            shard = shard.to(param_casting_dtype)
        return shard.contiguous() if to_contiguous else shard

    def undo_partition(self, shards: Sequence[Tensor], param_type: str, shape: Sequence[int]) -> Tensor:
        """The inverse of `partition_tensor` on all ranks: the whole parameter of `shape`."""
        return undo_partition(shards, self.layout(param_type, shape, len(shards)), shape)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the whole parameters of `module` on all ranks, which take rank 0's values; see `parallelize_module`.

        Raises PlanError where the strategy does not fit the module, or where it is cut already.
        """
        group, name, params = join(device_mesh), type(module).__name__, dict(module.named_parameters(recurse=False))
        with group.agree():
            try:
                bound = self.bind(module, group.size, name=name, config=getattr(module, "config", None))
                bound.check(module)
                for param_type, param in params.items():
                    layout, part = bound.layout(param_type, param.shape, group.size), vars(param).get("tp_part")
                    if part is not None and part.tp_shard.layout != layout:
                        raise ValueError(f"its {param_type} is tied to one that is cut otherwise")
                if hasattr(module, "tp_strategy") or any(map(_is_distributed, params.values())):
                    raise ValueError("it is parallel already")
            except ValueError as error:
                raise PlanError(f"{self!r} does not fit a {name}: {error}") from error
        for param in params.values():
            vars(param).pop("tp_shard", None)  # whole, in a model that was loaded with a plan
        cut_module(module, bound, group)
        return module

    @property
    def takes_sharded_input(self) -> bool:
        """Whether the module's features may arrive sharded over the ranks."""
        return isinstance(only(self.input_layouts), Shard)

    @property
    def leaves_sharded_output(self) -> bool:
        """Whether the module's features leave sharded over the ranks."""
        return isinstance(only(self.output_layouts), Shard)

    @property
    def is_built_in(self) -> bool:
        """True for a class of this package, whose attributes tell all that it communicates."""
        return type(self).__module__.startswith(f"{__package__}.")

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Called once the parameters of `module` are cut: `shards` is what this rank holds, by name in the module."""

    @property
    def acts(self) -> bool:
        """Whether the forward of the module needs more than its parameters as they are."""
        own, base = type(self), TensorParallelLayer
        return bool(self.hidden or self.widths) or any(getattr(own, name) is not getattr(base, name) for name in _ACTS)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Attributes of the module that have another value while it computes with this rank's tensors."""
        return {}

    def interrupted(self, module: nn.Module) -> None:
        """Called in place of `_prepare_output_fn` where the module's forward raised."""

    def local_hidden(self, module: nn.Module, name: str) -> Tensor | None:
        """What the local forward sees in place of the hidden parameter `name`."""
        return None

    def prepare_keywords(self, keywords: dict[str, Any], rank: int) -> dict[str, Any]:
        """Turn keyword arguments of the module's forward into what its local forward needs."""
        return keywords

    def prepare_beside(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn all arguments into what the local forward needs, once `_prepare_input_fn` has turned the first."""
        return args, keywords

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        """Turn the module's inputs into what its local forward needs. The bound strategy is `mod.tp_strategy`.

        `inputs` are the module's arguments in the order of its forward's signature, also where they came by keyword,
        up to the first that is left out.
        """
        return inputs

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        """Turn what the local forward returned into the module's output. The bound strategy is `mod.tp_strategy`."""
        return outputs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input={only(self.input_layouts)}, output={only(self.output_layouts)})"


_ACTS: tuple[str, ...] = ("_prepare_input_fn", "_prepare_output_fn", "prepare_keywords", "prepare_beside")
_ACTS += ("local_attributes", "interrupted")


def _is_distributed(param: Tensor) -> bool:
    shard = shard_of(param)
    return isinstance(param, DTensor) or (shard is not None and shard.layout is not None)


def only(layouts: Placements) -> Placement | None:
    """The one placement of a 1-D mesh."""
    return layouts[0] if isinstance(layouts, Sequence) else layouts


def as_sharded(x: Tensor, dim: int, length: int, mesh: DeviceMesh) -> DTensor:
    """The DTensor of `length` along `dim` of which this rank holds `x`; what it holds is what torch.chunk gives it."""
    shape = torch.Size((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
