"""Local tensors of parameters in a forward, and the conversion of their gradients in the backward.

The layers of a block share their input, and one autograd node per block instead of one per layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...ranks.collectives import Group, apply_directly, copy_to_region, reduce_from_region
from ...torch_api import as_torch, is_any_true, tree_map_only
from ..shards.tensors import HAS_LOCAL, ShardDTensor, ShardTensor, as_shard


class Guard:
    """What a block calls around a forward of its module, in training or with gradients, and in the first after that."""

    def begin(self, module: nn.Module) -> None:
        """Called before the forward of `module`."""

    def enter(self) -> None:
        """Called where activations begin to be sharded."""

    def leave(self, *_: Any) -> None:
        """Called where activations end to be sharded, and after the forward."""


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
        # torch.compile would compile again for the id of each layer's parameter.
        if torch.compiler.is_dynamo_compiling() or not self.is_open:
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
        copied, *views = apply_directly(_Enter)(x, group, *params)
        for param, view in zip(params, views, strict=True):
            self.views[id(param)] = (param, view)
        return copied

    def around(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run `call`, the module's forward, between the guards; in inference without them, but right after training."""
        if not (module.training or self.was_training or torch.is_grad_enabled()):
            return call(module, *args, **kwargs)
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


_DETACH, _ADD = torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor
_IS_NAN = torch.ops.aten.isnan.default


def local_view(param: Tensor) -> Tensor:
    """The local tensor of a parameter; the backward turns the gradient of a DTensor into a DTensor."""
    if not isinstance(param, HAS_LOCAL):
        return param
    if torch.compiler.is_compiling():
        return param.to_local() if torch.is_grad_enabled() and isinstance(param, DTensor) else param._local_tensor
    if torch.is_grad_enabled() and param.requires_grad:
        return apply_directly(_Enter)(None, None, param)[1]  # type: ignore[no-any-return]
    return param._local_tensor


class _Enter(torch.autograd.Function):
    """Copy `x` and make the `local_view` of sharded parameters that require gradients, in one autograd node.

    Its backward sums the gradient of `x` over the ranks of `group`, like that of `copy_to_region`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, group: dist.ProcessGroup | None, *params: Any) -> tuple[Any, ...]:
        ctx.group = group
        ctx.kinds = [(getattr(param, "_spec", None), getattr(param, "tp_shard", None)) for param in params]
        ctx.set_materialize_grads(False)  # some may not be used
        return x if x is None else x.view_as(x), *[param._local_tensor.detach() for param in params]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *of_params = grads
        kinds = zip(of_params, ctx.kinds, strict=True)
        wrapped = [None if grad is None else _wrapped(grad, *kind) for grad, kind in kinds]
        return None if x is None else reduce_from_region(x, ctx.group), None, *wrapped


class _Arriving(DTensor):
    """A gradient on its way to a DTensor parameter; the parameter's `.grad` becomes a DTensor.

    Autograd's last node detaches it or adds it to the existing gradient, here as operations on this rank's values. As
    DTensor operations, they would take most of the time that a backward spends outside of arithmetic.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See `torch.Tensor`; all other operations are DTensor's."""
        first, *rest = args
        if func is _DETACH:
            return _wrap(first._local_tensor, first._spec)
        if func is _ADD and not kwargs and isinstance(first, DTensor) and first.placements == rest[0].placements:
            first._local_tensor.add_(rest[0]._local_tensor)
            return first
        if func is is_any_true:
            return func(first._local_tensor)
        args, kwargs = tree_map_only(_Arriving, _arrived, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        # `torch.autograd.detect_anomaly` then calls an operator for "is any true" that DTensor does not support.
        return _wrap(result._local_tensor, result._spec, _Arriving) if func is _IS_NAN else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_arrived(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor: users get gradients of this class from `torch.autograd.grad` and in parameter hooks."""
        return _arrived(self).__reduce_ex__(protocol)


class _ArrivingShard(_Arriving, ShardDTensor):
    """Such a gradient of a `ShardDTensor`; hooks compute on it as on the full gradient."""


def _arrived(grad: DTensor) -> Tensor:
    return _wrap(grad._local_tensor, grad._spec)


def _wrap(grad: Tensor, spec: Any, cls: type[DTensor] = DTensor) -> Tensor:
    return DTensor.__new__(cls, grad, spec, requires_grad=False)  # not __init__, which is slow and does nothing


def _wrapped(grad: Tensor, spec: Any, shard: Any) -> Tensor:
    """The gradient of a parameter as its hooks and `torch.autograd.grad` get it."""
    if spec is None:
        return as_shard(grad.view_as(grad), ShardTensor, shard)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():  # recorded, for higher-order gradients
        layout: Any = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
        recorded = DTensor.from_local(grad, spec.mesh, spec.placements, **layout)
        return recorded if shard is None else as_shard(recorded, ShardDTensor, shard)
    arriving = _wrap(grad, spec, _Arriving)
    return arriving if shard is None else as_shard(arriving, _ArrivingShard, shard)
