"""Attach a strategy to a module, so that it computes with this rank's shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...marks import untyped
from ..shards.shard import ParamShard
from .block import Block
from .communication import Communication, Forwarder, forward_of_linear


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
        strategy: bound to the module; set as `module.tp_strategy`.
        shards: this rank's shards, by parameter name within the module.
        takes_dtensors: True if the module may get DTensors; if False, and the strategy needs neither views nor
            communication, the forward is not wrapped.
    """
    untyped(module).tp_strategy = strategy
    untyped(module).tp_forwards = []
    strategy.arguments, strategy.rank = argument_names(module), mesh.get_local_rank()
    strategy.group_name = mesh.get_group().group_name
    strategy.attached(module, shards, mesh)
    views = {name: shard for name, shard in shards.items() if shard.needs_view}
    if not (views or takes_dtensors or strategy.acts):
        return
    is_plain = type(module) is nn.Linear and "forward" not in module.__dict__ and not strategy.widths
    short = strategy.short_forward() if is_plain else None
    strategy.asks_block = short is not None

    def around(call: Forwarder) -> Forwarder:
        general = _communicating(call, shards, views, mesh)
        return general if short is None else forward_of_linear(general, short, strategy, views, mesh)

    wrap_forward(module, around)


def _communicating(
    call: Forwarder, shards: Mapping[str, ParamShard], views: Mapping[str, ParamShard], mesh: DeviceMesh
) -> Forwarder:
    """Wrap `call`, the forward of a module: local tensors inside, `before` and `after` of its strategy around it."""

    def forward(mod: Any, *args: Any, **kwargs: Any) -> Any:
        is_computed = any(name not in mod._parameters for name in views)
        return (untraced if is_computed else traced)(mod, *args, **kwargs)

    def traced(mod: Any, *args: Any, **kwargs: Any) -> Any:
        # Read directly, not by a `Mark`: torch.compile then loses the restored parameters.
        strategy: Communication = mod.tp_strategy
        # Without strict=False: torch.compile before torch 2.12 reads it as True.
        state = Forward({**dict(zip(strategy.arguments, args)), **kwargs})  # noqa: B905
        forwards: list[Forward] = mod.tp_forwards
        is_local = any(outer.replaced is not None for outer in forwards)
        forwards.append(state)
        try:
            names = _input_names(strategy.arguments, args, kwargs)
            inputs = strategy.before(mod, (*args, *(kwargs[name] for name in names)), mesh)
            if not is_local and any(isinstance(value, DTensor) for value in inputs):
                state.replaced = _enter_dtensor_view(mod, shards, mesh)
            elif not is_local:
                state.replaced = _enter_local_view(mod, strategy, views)
            count = len(args) if len(inputs) == len(args) + len(names) else len(inputs)
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            kwargs.update(zip(names, inputs[count:]))  # noqa: B905
            args, kwargs = strategy.prepare_arguments(mod, inputs[:count], kwargs, mesh)
            state.given = {}
            output = call(mod, *args, **kwargs)
        except BaseException:
            _leave_view(mod, state)
            strategy.interrupted(mod, mesh)
            forwards.pop()
            raise
        try:
            _leave_view(mod, state)
            return strategy.after(mod, output, mesh)
        finally:
            forwards.pop()

    # torch.compile misses the replacement of computed values. `is_compiling()` does not tell whether it traces: after a
    # graph break it skips `traced`, in all modules, and traces what `traced` calls.
    untraced: Forwarder = torch.compiler.disable(traced)
    return forward


def wrap_forward(module: nn.Module, around: Callable[[Forwarder], Forwarder]) -> None:
    """Replace the module's forward `call` by `around(call)`; both take the module as first argument.

    The new forward is a bound method, and a deep copy binds it to the copy: it has to read the module's state from that
    argument. Hooks of users run outside of it.
    """
    own = module.__dict__.get("forward")
    if own is None:
        call = type(module).forward
    elif isinstance(own, MethodType) and own.__self__ is module:
        call = own.__func__
    else:
        call = wraps(own)(lambda _, *args, **kwargs: own(*args, **kwargs))
    untyped(module).forward = MethodType(wraps(call)(around(call)), module)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter `name` of a module or of its children.

    Not by `get_parameter`: to torch.compile a sharded parameter is no nn.Parameter, which that requires.
    """
    owner, _, param_type = name.rpartition(".")
    param = module.get_submodule(owner)._parameters[param_type]
    assert param is not None
    return param


def put_parameters(module: nn.Module, params: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Replace parameters of a module and its children, by their names in the module; return the replaced ones."""
    replaced: dict[str, torch.Tensor | None] = {}
    for name, param in params.items():
        owner, _, param_type = name.rpartition(".")
        parameters: Any = (module.get_submodule(owner) if owner else module)._parameters
        replaced[name], parameters[param_type] = parameters[param_type], param
    return replaced


def block_of(module: nn.Module) -> Block:
    """The `Block` of `module`; the first call creates it and wraps the module's forward."""
    existing: Block | None = vars(module).get("tp_block")
    if existing is not None:
        return existing
    untyped(module).tp_block = block = Block()

    def around(call: Forwarder) -> Forwarder:
        return lambda mod, *args, **kwargs: mod.tp_block.around(call, mod, args, kwargs)

    wrap_forward(module, around)
    return block


def join_layers(module: nn.Module) -> None:
    """Let the child layers of `module` share inputs and local views of parameters; see `Block`."""
    strategies = [vars(child)["tp_strategy"] for child in module.children() if "tp_strategy" in vars(child)]
    for strategy in strategies if len(strategies) > 1 else ():
        strategy.block = block_of(module)


Replaced = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""The module's own parameters, attributes and properties, while local ones replace them."""


class Forward:
    """The state of one forward of one module; a deep copy is empty."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        """The arguments by name, until the module's own forward begins."""
        self.replaced: Replaced | None = None
        self.notes: dict[str, Any] = {}
        """Values that the strategy stores in `before` for `after`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward({})


def forward_of(module: Any) -> Forward:
    """The current forward of `module`; the innermost of nested ones."""
    forwards: list[Forward] = module.tp_forwards
    return forwards[-1]


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of the module's forward, in order."""
    arguments = inspect.signature(module.forward).parameters.values()
    return tuple(arg.name for arg in arguments if arg.kind in (arg.POSITIONAL_ONLY, arg.POSITIONAL_OR_KEYWORD))


def _input_names(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of keyword arguments that continue the positional ones in the order of the signature.

    Without positional arguments, they begin at the first that is given.
    """
    keywords: tuple[str, ...] = ()
    for name in names[len(args) :]:
        if name in kwargs:
            keywords += (name,)
        elif args or keywords:
            break
    return keywords if keywords or args else tuple(kwargs)[:1]


def _leave_view(module: nn.Module, forward: Forward) -> None:
    """Restore the module's own parameters, attributes and properties."""
    if forward.replaced is None:
        return
    params, attributes, properties = forward.replaced
    put_parameters(module, params)
    for name, value in attributes.items():
        module.__dict__[name] = value
    for name, value in properties.items():
        setattr(type(module), name, value)


def _enter_dtensor_view(module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> Replaced:
    """Replace replicated parameters of the module by DTensors; return the replaced ones.

    DTensor sums the gradient of such a parameter over the ranks if it is `Partial`.
    """
    replicated = {
        name: DTensor.from_local(param, mesh, [Replicate()], run_check=False)
        for name, param in module._parameters.items()
        if param is not None and name in shards and shards[name].layout is None and not isinstance(param, DTensor)
    }
    return put_parameters(module, replicated), {}, {}


def _enter_local_view(module: nn.Module, strategy: Communication, views: Mapping[str, ParamShard]) -> Replaced:
    """Replace the module's parameters, attributes and properties by local ones; return the replaced ones.

    A parameter may be computed from others: `prune` and `weight_norm` of `torch.nn.utils` store it in an attribute,
    `parametrize` computes it in a property of the class, which it makes for each module.
    """
    widths = {name: strategy.ranks.counts(width)[strategy.rank] for name, width in strategy.widths.items()}
    local = {**widths, **strategy.local_attributes(module, strategy.rank)}
    properties: dict[str, Any] = {}
    for name, shard in views.items():
        if name in module._parameters:
            continue
        view = shard.view(getattr(module, name))
        if name in module.__dict__:
            local[name] = view
        else:
            properties[name] = inspect.getattr_static(module, name)
            setattr(type(module), name, view)
    replaced = put_parameters(module, strategy.local_parameters(module, views))
    attributes = {name: module.__dict__[name] for name in local}
    for name, value in local.items():
        module.__dict__[name] = value
    return replaced, attributes, properties


class LocalConfig:
    """A module's view of the model's config, with other values for some attributes."""

    def __init__(self, config: Any, **local: Any) -> None:
        self.__dict__.update(local, _shared=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_shared":
            raise AttributeError(name)
        return getattr(self._shared, name)
