"""Inputs and parameters of a block's layers, which share one autograd node per block instead of one per layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import Group, copy_to_region
from ...torch_api import as_torch
from ..shards.tensors import HAS_LOCAL
from .views import enter, local_view


class Guard(Protocol):
    """Callbacks around a module's forwards with gradients or in training mode, and the first one after that."""

    def begin(self, module: nn.Module) -> None:
        """Called before the forward."""

    def enter(self) -> None:
        """Called by a strategy during the forward, where sharded features begin."""

    def leave(self) -> None:
        """Called where replicated features begin again, and after the forward, also if it raised."""


class Block:
    """Tensors that the layers of a module share during its forward.

    Layers with the same input, such as query, key and value projections, share one copy of it. Autograd adds up their
    gradients there, on each rank, and the backward has one all-reduce instead of one per layer.

    The first layer makes the local views of all parameters: one autograd node sums the gradient of the input, and turns
    the gradients of parameters into DTensors.
    """

    def __init__(self, guards: Sequence[Guard] = ()) -> None:
        self.guards = list(guards)
        self.was_training = False
        self.children: tuple[nn.Module | None, ...] = ()
        self.layers: list[Any] = []
        """The layers in `children` that take their parameters from the block; an adapter may be around one."""
        self.is_open = False
        self.last: tuple[Tensor, int, Tensor] | None = None
        """An input, its version, and its copy."""
        self.views: dict[int, tuple[Tensor, Tensor]] = {}
        """Sharded parameters and their local views, by the parameters' `id`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        return Block(copy.deepcopy(self.guards, memo))

    def copy(self, x: Tensor, strategy: Any, mesh: DeviceMesh) -> Tensor:
        """A copy of `x` for the region where ranks compute on sharded features; see `copy_to_region`."""
        last, compiles = self.last, torch.compiler.is_dynamo_compiling()
        version = 0 if compiles else x._version  # torch.compile cannot compare versions
        if last is not None and last[0] is x and last[1] == version:
            return last[2]
        if self.is_open and not self.views and not compiles:
            copied: Tensor = self._enter(x, strategy.group_of(mesh))
        else:
            copied = copy_to_region(x, strategy.group_of(mesh))
        if self.is_open:
            self.last = (x, version, copied)
        return copied

    def local(self, param: Tensor) -> Tensor:
        """The local view of a parameter of one of the layers."""
        if torch.compiler.is_dynamo_compiling():  # which would compile again for the id of each layer's parameter
            return local_view(param)
        entry = self.views.get(id(param))
        return self._first(param) if entry is None else entry[1]

    def _first(self, param: Tensor) -> Tensor:
        if not self.is_open:
            return local_view(param)
        if not self.views:
            self._enter(None, None)
        if id(param) not in self.views:
            self.views[id(param)] = (param, local_view(param))
        return self.views[id(param)][1]

    def _enter(self, x: Tensor | None, group: Group | None) -> Any:
        """Copy `x` and make local views of the parameters, in one autograd node.

        A parameter with hooks gets its own node later: in the shared node its hook would run without a gradient.
        """
        with as_torch():
            params = [
                param
                for layer in self.layers
                for param in layer._parameters.values()
                if isinstance(param, HAS_LOCAL) and param.requires_grad and not param._backward_hooks
            ]
        copied, views = enter(x, group, *params)
        for param, view in zip(params, views, strict=True):
            self.views[id(param)] = (param, view)
        return copied

    def around(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run `call`, the module's forward, between the guards; in inference it is used only right after training."""
        opens = not self.is_open and torch.is_grad_enabled()
        if opens:
            self.is_open = True
            if not torch.compiler.is_dynamo_compiling():  # which makes no shared node, and would compile again
                self._find_layers(module)
        self.was_training = module.training
        try:
            for guard in self.guards:
                guard.begin(module)
            return call(module, *args, **kwargs)
        finally:
            for guard in self.guards:
                guard.leave()
            if opens:
                self.is_open, self.last, self.views = False, None, {}

    def _find_layers(self, module: nn.Module) -> None:
        children = tuple(module._modules.values())
        if children != self.children:
            inside = (layer for child in module.children() for layer in child.modules())
            layers = [(layer, layer.__dict__["tp_strategy"]) for layer in inside if "tp_strategy" in layer.__dict__]
            self.layers = [layer for layer, strategy in layers if strategy.block is self and strategy.asks_block]
            self.children = children
