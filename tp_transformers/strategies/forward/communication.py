"""Communication of a strategy around one module's forward: `before`, `after`, and whether features are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ...copies import copied_only
from ...ranks.collectives import Group, copy_to_region
from ...slices.layout import Split
from ...torch_api import resolve_process_group
from ..shards.shard import ParamShard
from ..signature import Signature
from .block import Block

Placements = Sequence[Placement] | Placement | None


class Steps(NamedTuple):
    """The steps of a linear's forward that stand in place of a strategy's `before` and `after`."""

    given: Literal["as it is", "copied", "before"]
    """The input: as it is; `copy` of one that has a gradient; `before`."""
    left: Literal["as it is", "summed", "after"]
    """The output: as it is; summed in place, then its bias added; `after`."""


class Communication:
    """The half of a strategy that runs in a forward; `attach` puts it around that of the module.

    A class implements `before` and `after`, or their static forms `_prepare_input_fn` and `_prepare_output_fn`; each
    form is derived from the other, so that the most derived class counts, whichever it implements.
    """

    hidden: tuple[str, ...] = ()
    """Parameters that the local forward must not see (a bias that may be added only once)."""
    signature: Signature = Signature()
    """How activations lie over the ranks before and after the module; `__init__` takes it from the layouts."""
    arguments: tuple[str, ...] = ()
    """Names of the arguments of the module's forward that can be given by position, once it is attached."""
    input_layouts: Placements
    output_layouts: Placements
    desired_input_layouts: Placements
    use_local_output: bool
    widths: Mapping[str, int] = MappingProxyType({})
    """Attributes of the module that are cut evenly in its forward, with their unsharded values."""
    size: int
    """Number of ranks."""
    _splits: Mapping[tuple[int, int, int], Split] = MappingProxyType({})
    """By length, ranks and unit: a forward asks for them again."""
    rank: int
    """This process among them, once the strategy is attached."""
    asks_block = False
    """True for a linear that asks its block for local views; nobody else reads the output that `after` is given then,
    not even a backward."""
    name: str
    """The name of the module, in messages."""
    group_name: Any = None
    """The name of their process group, once the strategy is attached."""
    block: Block | None = None
    """The block whose layers it shares inputs and the node of its parameters with, once `join_layers` has joined them.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Derive `before` from `_prepare_input_fn` where the class has only that, and the reverse; likewise `after`.

        A class has its own definitions, and those of a mixin that is no strategy.
        """
        super().__init_subclass__(**options)
        known = {each for base in cls.__bases__ if Communication in base.__mro__ for each in base.__mro__}
        own = {name for each in cls.__mro__ if each not in known for name in vars(each)}
        if "_prepare_input_fn" in own and "before" not in own:
            cls.before = lambda self, module, inputs, mesh: as_inputs(  # type: ignore[method-assign]
                cls._prepare_input_fn(self.input_layouts, self.desired_input_layouts, module, inputs, mesh), inputs
            )
        elif "before" in own and "_prepare_input_fn" not in own:
            cls._prepare_input_fn = staticmethod(  # type: ignore[method-assign,assignment]
                lambda _, __, module, inputs, mesh: cls.before(module.tp_strategy, module, inputs, mesh)
            )
        if "_prepare_output_fn" in own and "after" not in own:
            cls.after = lambda self, module, outputs, mesh: cls._prepare_output_fn(  # type: ignore[method-assign]
                self.output_layouts, self.use_local_output, module, outputs, mesh
            )
        elif "after" in own and "_prepare_output_fn" not in own:
            cls._prepare_output_fn = staticmethod(  # type: ignore[method-assign,assignment]
                lambda _, __, module, outputs, mesh: cls.after(module.tp_strategy, module, outputs, mesh)
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One that is attached is copied with its module; a pickle of that module is refused."""
        if self.group_name is None:
            return super().__reduce_ex__(protocol)
        return copied_only(self, "pickle of a tensor-parallel module", f"{self.name}, as one rank holds it")

    @property
    def sharded_input(self) -> Split | None:
        """Split of the input features over the ranks; None where they are replicated, or it is not known."""
        return None

    @property
    def sharded_output(self) -> Split | None:
        """Split of the output features over the ranks; None where they are replicated, or it is not known."""
        return None

    def group_of(self, mesh: DeviceMesh) -> Group:
        """`mesh.get_group()`, by its name: the mesh takes longer, and finds the same."""
        if self.group_name is None or torch.compiler.is_dynamo_compiling():
            return mesh.get_group()
        found: Group = resolve_process_group(self.group_name)
        return found

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Called once the parameters of `module` are cut: `shards` are this rank's, by name in the module."""

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called once the modules inside of `module` are attached, too."""

    def short_steps(self) -> Steps | None:
        """The steps of `before` and `after` for plain tensors, where they keep nothing meanwhile; None for others."""
        return None

    def views_of(self, module: nn.Module, views: Mapping[str, ParamShard]) -> Iterable[str]:
        """Names of those parameters, of `views`, that the forward of `module` sees local tensors of."""
        return views

    def traced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The module's `forward`, as torch.compile is to see it."""
        return forward

    def copy(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """See `copy_to_region`; layers of one block share a copy."""
        if self.block is None:
            return copy_to_region(x, self.group_of(mesh))
        return self.block.copy(x, self, mesh)

    @property
    def acts(self) -> bool:
        """True if the forward of the module needs more than its parameters as they are."""
        own, base = type(self), Communication
        return bool(self.hidden or self.widths) or any(getattr(own, name) is not getattr(base, name) for name in _ACTS)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """Attributes of the module that have another value while it computes with this rank's tensors."""
        return {}

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called in place of `after` where the module's forward raised."""

    def local_hidden(self, module: nn.Module, name: str) -> Tensor | None:
        """The tensor that the local forward sees in place of the hidden parameter `name`; None for none."""
        return None

    def prepare_beside(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert all arguments for the local forward, once `before` has converted the first."""
        return args, keywords

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        """Turn the module's inputs into the inputs of its local forward, with the collectives that this takes.

        `inputs` are the module's arguments in the order of its forward's signature, also where they came by keyword,
        up to the first that is left out.
        """
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        """Turn the outputs of the local forward into the module's outputs, with the collectives that this takes."""
        return outputs

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        """`before` as a static method, for strategies of users; it may return the first input alone.

        The bound strategy is `mod.tp_strategy`.
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
        """`after` as a static method, for strategies of users. The bound strategy is `mod.tp_strategy`."""
        return outputs


_ACTS = ("before", "after", "prepare_beside", "local_attributes", "interrupted")


def as_inputs(found: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """All inputs of a module, of which a user's function may return the first alone, or nothing to change none."""
    if found is None:
        return inputs
    return found if isinstance(found, tuple) else (found, *inputs[1:])


def only(layouts: Placements) -> Placement | None:
    """The one placement of a 1-D mesh."""
    return layouts[0] if isinstance(layouts, Sequence) else layouts


def as_sharded(x: Tensor, dim: int, length: int, mesh: DeviceMesh) -> DTensor:
    """The DTensor of `length` along `dim` from this rank's `x`; its shard is that of torch.chunk."""
    shape = torch.Size((*x.shape[:dim], length, *x.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
