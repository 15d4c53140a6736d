"""How a strategy is attached to a module, which then computes with this rank's shards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile, takewhile
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..marks import untyped
from ..slices.layout import even_widths
from .communication import Communication
from .shards.shard import ParamShard


def attach(
    module: nn.Module,
    strategy: Communication,
    shards: Mapping[str, ParamShard],
    mesh: DeviceMesh,
    *,
    takes_dtensors: bool = True,
) -> None:
    """Make `module` compute with this rank's shards: its forward sees local tensors, `strategy` communicates around it.

    Args:
        strategy: bound to the module; stays reachable as `module.tp_strategy`.
        shards: this rank's shards, by parameter name within the module.
        takes_dtensors: True if the module may be given DTensors; if False, and nothing else is to be done, its
            forward is left alone.
    """
    # The hooks take all that is the module's own from the module that they are called for, which may be a deep copy.
    untyped(module).tp_strategy = strategy
    untyped(module).tp_forwards = []
    strategy.arguments = argument_names(module)
    strategy.attached(module, shards, mesh)
    views = {name: shard for name, shard in shards.items() if shard.needs_view}
    if not (views or takes_dtensors or strategy.acts):
        return
    rank = mesh.get_local_rank()

    def begin(mod: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Read directly: torch.compile loses what a hook restores where a mark reads the module.
        strategy: Communication = mod.tp_strategy
        forward = Forward({**dict(zip(strategy.arguments, args, strict=False)), **kwargs})
        outer: list[Forward] = mod.tp_forwards
        is_local = any(other.replaced is not None for other in outer)
        outer.append(forward)
        names = _input_names(strategy.arguments, args, kwargs)
        inputs = (*args, *(kwargs[name] for name in names))
        given = len(inputs)
        inputs = strategy.before(mod, inputs, mesh)
        if not is_local:
            is_dtensor = any(isinstance(value, DTensor) for value in inputs)
            forward.replaced = (
                _enter_dtensor_view(mod, shards, mesh) if is_dtensor else _enter_local_view(mod, strategy, views, rank)
            )
        count = len(args) if len(inputs) == given else len(inputs)
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
        kwargs.update(zip(names, inputs[count:], strict=False))
        args, kwargs = strategy.prepare_beside(mod, inputs[:count], kwargs, mesh)
        forward.given = {}
        return args, kwargs

    def end(mod: Any, args: tuple[Any, ...], output: Any) -> Any:
        strategy: Communication = mod.tp_strategy
        forwards: list[Forward] = mod.tp_forwards
        if not forwards:  # another hook raised before this forward began
            return None
        try:
            if forwards[-1].replaced is not None:
                mod._parameters.update(forwards[-1].replaced[0])
                mod.__dict__.update(forwards[-1].replaced[1])
            if output is None:  # the forward raised
                strategy.interrupted(mod, mesh)
                return None
            return strategy.after(mod, output, mesh)
        finally:
            forwards.pop()

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


class Forward:
    """The state of one forward of one module, which a deep copy of the module begins without."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        """The arguments by name, until the module's own forward begins."""
        self.replaced: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The parameters and the attributes of the module in whose place it sees local ones."""
        self.notes: dict[str, Any] = {}
        """Values that the strategy keeps from the input to the output."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward({})


def forward_of(module: Any) -> Forward:
    """The forward of `module` that is under way; of several, which are nested, the innermost."""
    forwards: list[Forward] = module.tp_forwards
    return forwards[-1]


@contextmanager
def begun_forward(module: Any) -> Iterator[None]:
    """Let a strategy's input and output functions be called for `module` without its forward."""
    forwards: list[Forward] = module.tp_forwards
    forwards.append(Forward({}))
    try:
        yield
    finally:
        forwards.pop()


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of the module's forward that can be given by position, in order."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def _input_names(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The keywords that go on where the positional arguments end, as though they were positional too.

    Without positional arguments, they begin at the first that is given.
    """
    rest = names[len(args) :]
    if not args:
        rest = tuple(dropwhile(lambda name: name not in kwargs, rest)) or tuple(kwargs)[:1]
    return tuple(takewhile(lambda name: name in kwargs, rest))


def _enter_dtensor_view(
    module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let the module see DTensors in place of the parameters that are whole; returns what was there.

    The gradient of one is summed over the ranks where DTensors say that each has a part of it.
    """
    parameters = module._parameters
    saved: dict[str, Any] = {
        name: param
        for name, param in parameters.items()
        if param is not None and name in shards and shards[name].layout is None and not isinstance(param, DTensor)
    }
    for name, param in saved.items():
        parameters[name] = DTensor.from_local(param, mesh, [Replicate()], run_check=False)  # type: ignore[assignment]
    return saved, {}


def _enter_local_view(
    module: nn.Module, strategy: Communication, views: Mapping[str, ParamShard], rank: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let the module see local tensors in place of its parameters; returns what was there."""
    parameters = module._parameters
    saved: dict[str, Any] = {
        name: parameters[name] for name in (*views, *strategy.hidden) if parameters.get(name) is not None
    }
    for name, param in saved.items():
        hidden = name in strategy.hidden
        local = strategy.local_hidden(module, name) if hidden else views[name].view(param)
        parameters[name] = local  # type: ignore[assignment]
    widths = {name: even_widths(width, strategy.size)[rank] for name, width in strategy.widths.items()}
    attributes = {**widths, **strategy.local_attributes(module, rank)}
    saved_attributes = {name: module.__dict__[name] for name in attributes}
    module.__dict__.update(attributes)
    return saved, saved_attributes


class LocalConfig:
    """A module's view of a config that it shares with the whole model, with other values for some attributes."""

    def __init__(self, config: Any, **local: Any) -> None:
        self.__dict__.update(local, _shared=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_shared":
            raise AttributeError(name)
        return getattr(self._shared, name)
