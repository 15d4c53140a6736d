"""Attach a strategy to a module, so that it computes with this rank's shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrize

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
        if torch.compiler.is_compiling() and any(name not in mod._parameters for name in views):
            return untraced(mod, *args, **kwargs)  # torch.compile misses the replacement of computed values
        # Read directly, not by a `Mark`: torch.compile then loses the restored parameters.
        strategy: Communication = mod.tp_strategy
        state = Forward(strategy.arguments, args, kwargs)
        forwards: list[Forward] = mod.tp_forwards
        is_local = any(outer.replaced is not None for outer in forwards)
        forwards.append(state)
        try:
            names = _input_names(strategy.arguments, args, kwargs)
            inputs = (*args, *(kwargs[name] for name in names))
            input_count = len(inputs)
            inputs = strategy.before(mod, inputs, mesh)
            if not is_local:
                is_dtensor = any(isinstance(value, DTensor) for value in inputs)
                if is_dtensor:
                    state.replaced = _enter_dtensor_view(mod, shards, mesh)
                else:
                    state.replaced = _enter_local_view(mod, strategy, views)
            count = len(args) if len(inputs) == input_count else len(inputs)
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            kwargs.update(zip(names, inputs[count:]))  # noqa: B905, see Forward
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

    untraced: Forwarder = torch.compiler.disable(forward)
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
        parameters: Any = module.get_submodule(owner)._parameters
        replaced[name], parameters[param_type] = parameters[param_type], param
    return replaced


def block_of(module: nn.Module) -> Block:
    """The `Block` of `module`; the first call creates it and wraps the module's forward."""
    existing: Block | None = vars(module).get("tp_block")
    if existing is not None:
        return existing
    untyped(module).tp_block = block = Block()

    def around(call: Forwarder) -> Forwarder:
        def forward(mod: Any, *args: Any, **kwargs: Any) -> Any:
            block: Block = mod.tp_block
            if mod.training or block.was_training or torch.is_grad_enabled():
                return block.around(call, mod, args, kwargs)
            return call(mod, *args, **kwargs)

        return forward

    wrap_forward(module, around)
    return block


def join_layers(module: nn.Module) -> None:
    """Let the child layers of `module` share inputs and local views of parameters; see `Block`."""
    strategies = [vars(child)["tp_strategy"] for child in module.children() if "tp_strategy" in vars(child)]
    for strategy in strategies if len(strategies) > 1 else ():
        strategy.block = block_of(module)


class _Computed(dict[str, Any]):
    """By name, tensors that `torch.nn.utils.parametrize` computed, while the module sees local ones instead."""


class Forward:
    """The state of one forward of one module; a deep copy is empty."""

    def __init__(
        self, names: Sequence[str] = (), args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        # Without strict=False: torch.compile before torch 2.12 reads it as True.
        self.given = {**dict(zip(names, args)), **(kwargs or {})}  # noqa: B905
        """The arguments by name, until the module's own forward begins."""
        self.replaced: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The module's own parameters and attributes, while local ones replace them."""
        self.notes: dict[str, Any] = {}
        """Values that the strategy stores in `before` for `after`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward()


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
    """Restore the module's own parameters and attributes."""
    if forward.replaced is None:
        return
    params, attributes = forward.replaced
    put_parameters(module, params)
    for name, value in attributes.items():
        module.__dict__[name] = value
    computed = module.__dict__.get("parametrizations") if attributes else None
    if isinstance(computed, _Computed):
        del module.__dict__["parametrizations"]
        _cache(module, computed)


def _enter_dtensor_view(
    module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace replicated parameters of the module by DTensors; return the replaced ones.

    DTensor sums the gradient of such a parameter over the ranks if it is `Partial`.
    """
    replicated = {
        name: DTensor.from_local(param, mesh, [Replicate()], run_check=False)
        for name, param in module._parameters.items()
        if param is not None and name in shards and shards[name].layout is None and not isinstance(param, DTensor)
    }
    return put_parameters(module, replicated), {}


def _enter_local_view(
    module: nn.Module, strategy: Communication, views: Mapping[str, ParamShard]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace the module's parameters and attributes by local ones; return the replaced ones."""
    computed = _view_computed(module, views) if any(name not in module._parameters for name in views) else {}
    replaced = put_parameters(module, strategy.local_parameters(module, views))
    widths = {name: strategy.ranks.counts(width)[strategy.rank] for name, width in strategy.widths.items()}
    attributes = {**widths, **strategy.local_attributes(module, strategy.rank)}
    saved_attributes = {name: module.__dict__[name] for name in attributes}
    for name, value in attributes.items():
        module.__dict__[name] = value
    return replaced, {**saved_attributes, **computed}


def _view_computed(module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Any]:
    """Replace tensors that the module computes from parameters by local ones; return the replaced ones.

    `torch.nn.utils.parametrize` computes them in a module of `parametrizations`, which is replaced by a function that
    returns the local tensor; `prune` and `weight_norm` store them in an attribute.
    """
    saved: dict[str, Any] = {}
    for name in views.keys() - module._parameters.keys():
        value = getattr(module, name)
        local = views[name].view(value)
        if name in module.__dict__:
            saved[name], module.__dict__[name] = value, local
        else:
            saved.setdefault("parametrizations", _Computed())[name] = value
            module.__dict__["parametrizations"] = {**untyped(module).parametrizations, name: lambda local=local: local}
            _cache(module, {name: local})
    return saved


def _cache(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Put these values of the module into the cache of `parametrize.cached`, if it is active."""
    if parametrize._cache_enabled:
        parametrize._cache.update({(id(module), name): value for name, value in values.items()})


class LocalConfig:
    """A module's view of the model's config, with other values for some attributes."""

    def __init__(self, config: Any, **local: Any) -> None:
        self.__dict__.update(local, _shared=config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_shared":
            raise AttributeError(name)
        return getattr(self._shared, name)
