"""Communication of a strategy around one module's forward: `before`, `after`, and whether features are sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from ...copies import copied_only
from ...ranks import direct
from ...ranks.collectives import Group, copy_to_region
from ...slices.layout import Ranks, Split
from ...torch_api import resolve_process_group
from ..shards.shard import ParamShard
from ..shards.tensors import HAS_LOCAL
from ..signature import Placements, Signature
from .block import Block, local_view

Forwarder = Callable[..., Any]
"""The forward of a module, with the module as first argument."""


class ShortForward(NamedTuple):
    """The steps of a linear's short forward that replace a strategy's `before` and `after`."""

    input: Literal["as it is", "copied", "before"]
    """The input: unchanged; `copy` if it requires a gradient; `before`."""
    output: Literal["as it is", "summed", "after"]
    """The output: unchanged; summed in place, then the bias is added; `after`."""


_NONE: Mapping[Any, Any] = {}  # a MappingProxyType breaks graphs of torch.compile


class Communication:
    """The methods of a strategy that run in a forward; `attach` wraps the module's forward with them.

    A class implements `before` and `after`, or their static forms `_prepare_input_fn` and `_prepare_output_fn`. Each
    form is derived from the other, so that the most derived class wins, whichever form it implements.
    """

    hidden: tuple[str, ...] = ()
    """Parameters that the local forward must not see (a bias that may be added only once)."""
    signature: Signature = Signature()
    """Placements of activations before and after the module; the layouts complete it."""
    arguments: tuple[str, ...] = ()
    """Names of the positional arguments of the module's forward, once the strategy is attached."""
    input_layouts: Placements = None
    output_layouts: Placements = None
    desired_input_layouts: Placements = None
    use_local_output = True
    widths: Mapping[str, int] = _NONE
    """Attributes of the module that are split over the ranks in its forward, with their unsharded values."""
    ranks: Ranks = Ranks(1)
    """The ranks over which the module is split; bound to a module, those of the model."""
    _splits: Mapping[tuple[int, int, int], Split] = _NONE
    """Cache of `split_length`, by length, ranks and unit."""
    rank: int
    """Rank of this process, once the strategy is attached."""
    asks_block = False
    """True for a linear that takes local views from its block; `after` may then overwrite the output, since nothing
    else reads it, not even a backward."""
    name = "the module"
    """The name of the module, in messages."""
    group_name: Any = None
    """The name of the process group, once the strategy is attached."""
    block: Block | None = None
    """The block with the layers that share inputs and an autograd node with this one; `join_layers` sets it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Derive `before` from `_prepare_input_fn` if the class defines only that, and the reverse; likewise `after`.

        Definitions of a mixin that is no strategy count as the class's own.
        """
        super().__init_subclass__(**options)
        inherited = {parent for base in cls.__bases__ if Communication in base.__mro__ for parent in base.__mro__}
        own = {name for parent in cls.__mro__ if parent not in inherited for name in vars(parent)}
        if "_prepare_input_fn" in own and "before" not in own:
            cls.before = lambda self, module, inputs, mesh: as_inputs(  # type: ignore[method-assign]
                cls._prepare_input_fn(self.input_layouts, self.desired_input_layouts, module, inputs, mesh), inputs
            )
        if "_prepare_output_fn" in own and "after" not in own:
            cls.after = lambda self, module, outputs, mesh: cls._prepare_output_fn(  # type: ignore[method-assign]
                self.output_layouts, self.use_local_output, module, outputs, mesh
            )
        for method, static in (("before", "_prepare_input_fn"), ("after", "_prepare_output_fn")):
            if method in own and static not in own:
                setattr(cls, static, vars(Communication)[static])  # which calls the method

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Allow a copy of an attached strategy with its module; a pickle raises."""
        if self.group_name is None:
            return super().__reduce_ex__(protocol)
        return copied_only(self, "pickle of a tensor-parallel module", f"{self.name}, as one rank holds it")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    @property
    def sharded_input(self) -> Split | None:
        """Split of the input features over the ranks; None if they are replicated, or it is unknown."""
        return None

    @property
    def sharded_output(self) -> Split | None:
        """Split of the output features over the ranks; None if they are replicated, or it is unknown."""
        return None

    def group_of(self, mesh: DeviceMesh | None = None) -> Group:
        """The same as `mesh.get_group()`, but faster, by its name; torch.compile needs the mesh."""
        if mesh is not None and (self.group_name is None or torch.compiler.is_dynamo_compiling()):
            return mesh.get_group()
        group: Group = resolve_process_group(self.group_name)
        return group

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Called once the parameters of `module` are sharded: `shards` are this rank's, by name in the module."""

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called once strategies are attached to the modules inside of `module`, too."""

    def short_forward(self) -> ShortForward | None:
        """The short form of `before` and `after` for plain tensors; None if they need the state of the forward."""
        return None

    def local_parameters(self, module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Tensor | None]:
        """The tensors that the forward of `module` sees in place of its parameters and of its children's ("fc.weight").

        `views` are the shards of its parameters with `needs_view`.
        """
        local: dict[str, Tensor | None] = {}
        for name, param in module._parameters.items():
            if param is not None and (name in self.hidden or name in views):
                local[name] = None if name in self.hidden else views[name].view(param)
        return local

    def copy(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """See `copy_to_region`; layers of one block share a copy of the same input."""
        if self.block is None:
            return copy_to_region(x, self.group_of(mesh))
        return self.block.copy(x, self, mesh)

    @property
    def acts(self) -> bool:
        """True if the forward of the module has to be wrapped, even if it needs no local views."""
        own, base = type(self), Communication
        return bool(self.hidden or self.widths) or any(getattr(own, name) is not getattr(base, name) for name in _ACTS)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Attributes of the module, by name, with their local values during the forward."""
        return {}

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called instead of `after` if the module's forward raised."""

    def prepare_arguments(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert all arguments for the local forward, after `before` has converted its inputs."""
        return args, keywords

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        """Convert the module's inputs to the inputs of its local forward, with the necessary collectives.

        `inputs` are the module's arguments in the order of its forward's signature, also those passed by keyword, up to
        the first that is not passed.
        """
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        """Convert the outputs of the local forward to the module's outputs, with the necessary collectives."""
        return outputs

    @classmethod
    def _prepare_input_fn(
        cls,
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: Any,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> Any:
        """`before` of the strategy of `mod`. Strategies of users override this method by a static one without `cls`,
        which may return the first input alone.
        """
        return cls.before(mod.tp_strategy, mod, inputs, device_mesh)

    @classmethod
    def _prepare_output_fn(
        cls, output_layouts: Placements, use_local_output: bool, mod: Any, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        """`after` of the strategy of `mod`. Strategies of users override this method by a static one without `cls`."""
        return cls.after(mod.tp_strategy, mod, outputs, device_mesh)


_ACTS = ("before", "after", "prepare_arguments", "local_attributes", "interrupted")


def as_inputs(result: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """All inputs of a module, from a user's function that returned all, only the first, or None (unchanged)."""
    if result is None:
        return inputs
    return result if isinstance(result, tuple) else (result, *inputs[1:])


def as_sharded(x: Tensor, dim: int, length: int, mesh: DeviceMesh) -> DTensor:
    """The DTensor of `length` along `dim` from this rank's shard `x`, in the sizes of torch.chunk."""
    shape = torch.Size((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def forward_of_linear(
    general: Forwarder, short: ShortForward, strategy: Communication, views: Mapping[str, ParamShard], mesh: DeviceMesh
) -> Forwarder:
    """The forward of an `nn.Linear`, which equals `after(linear(before(input)))`.

    In inference it is `linear` on local tensors and, for a row-parallel one, an in-place all-reduce of its output.
    `general` is for DTensors, and for weights that are computed from others, as by `torch.nn.utils.parametrize`.
    """
    copies_input, prepares_input = short.input == "copied", short.input == "before"
    keeps_output, sums = short.output == "as it is", short.output == "summed"
    hides_bias = "bias" in strategy.hidden
    joins = {name for name, shard in views.items() if not shard.routes_gradient}

    def local(param: Tensor, name: str, block: Block | None) -> Tensor:
        if name not in joins or not isinstance(param, HAS_LOCAL):
            return views[name].view(param) if name in views else param
        if not torch.is_grad_enabled():
            return param._local_tensor
        return local_view(param) if block is None else block.local(param)

    @wraps(nn.Linear.forward)
    def forward(module: Any, input: Tensor) -> Any:
        parameters = module._parameters
        if type(input) is not Tensor or "weight" not in parameters or "bias" not in parameters:
            return general(module, input)
        strategy, weight, bias = module.tp_strategy, parameters["weight"], parameters["bias"]
        records, block = torch.is_grad_enabled(), strategy.block
        if prepares_input:
            (x,) = strategy.before(module, (input,), mesh)
        else:
            x = strategy.copy(input, mesh) if copies_input and records and input.requires_grad else input
        weight = local(weight, "weight", block)
        try:
            output = linear(x, weight, None if hides_bias or bias is None else local(bias, "bias", block))
        except RuntimeError:
            strategy.before(module, (input,), mesh)  # raises PlanError if the input has another width
            raise
        if sums and not records:
            direct.all_reduce(output, strategy.group_of(mesh))
            return output if bias is None else output + local(bias, "bias", block)
        return output if keeps_output else strategy.after(module, output, mesh)

    return forward
