"""How a strategy is attached to a module, which then computes with this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..layout import even
from ..mesh import TensorParallelGroup
from .shard import ParamShard, local_tensor, whole_like

if TYPE_CHECKING:
    from .base import TensorParallelLayer


def cut_module(module: nn.Module, strategy: TensorParallelLayer, group: TensorParallelGroup) -> None:
    """Cut the whole parameters of `module` as the bound `strategy` says, and let it communicate.

    All ranks take the values of rank 0, and have to call it. Parameters on the meta device stay there.
    """
    mesh, shards = group.device_mesh, {}
    assert mesh is not None
    for name, param in list(module.named_parameters(recurse=False)):
        if hasattr(param, "tp_part"):  # of another module that it is tied to
            module._parameters[name] = param.tp_part
        elif not hasattr(param, "tp_shard"):
            whole = param.data if param.is_meta else param.data.to(group.device)
            if not param.is_meta:
                dist.broadcast(whole, group=group.process_group, group_src=0)
            shard = strategy.shard(name, param.shape, group)
            shard.connect()
            part = strategy.partition_tensor(whole, whole_like(param), name, None, True, group.rank, mesh)
            own = local_tensor(part).clone()  # type: ignore[arg-type]
            param.tp_part = module._parameters[name] = shard.wrap(own, requires_grad=param.requires_grad)  # type: ignore[attr-defined]
        shards[name] = module._parameters[name].tp_shard  # type: ignore[union-attr]
    attach(module, strategy, shards, mesh)


def attach(
    module: nn.Module,
    strategy: TensorParallelLayer,
    shards: Mapping[str, ParamShard],
    mesh: DeviceMesh,
    *,
    takes_dtensors: bool = True,
) -> None:
    """Make `module` compute with this rank's shards: its forward sees local tensors, `strategy` communicates around it.

    Args:
        module: the module that owns the parameters.
        strategy: bound to the module; stays reachable as `module.tp_strategy`.
        shards: what this rank holds, by parameter name within the module.
        mesh: the 1-D mesh of the `tp` axis.
        takes_dtensors: whether the module may be given DTensors; where not, and nothing else is to be done, its
            forward is left alone.
    """
    # The hooks hold no reference to the module, so that a deep copy of it computes with its own parameters.
    module.tp_strategy = strategy  # type: ignore[assignment]
    strategy.attached(module, shards, mesh)
    views = {name: shard for name, shard in shards.items() if shard.needs_view}
    if not (views or takes_dtensors or strategy.acts):
        return
    rank = mesh.get_local_rank()
    replaced: list[tuple[dict[str, Any], dict[str, Any]] | None] = []

    def before(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = strategy.prepare_keywords(kwargs, rank)
        keyword = None if args or not kwargs else next(iter(kwargs))
        inputs = args if keyword is None else (kwargs[keyword],)
        inputs = strategy._prepare_input_fn(strategy.input_layouts, strategy.desired_input_layouts, mod, inputs, mesh)
        if any(isinstance(value, DTensor) for value in inputs):
            replaced.append(_enter_dtensor_view(mod, shards, mesh))
        else:
            replaced.append(_enter_local_view(mod, strategy, views, rank))
        args, kwargs = (inputs, kwargs) if keyword is None else ((), {**kwargs, keyword: inputs[0]})
        return mod.tp_strategy.prepare_beside(mod, args, kwargs, mesh)  # type: ignore[operator,union-attr,no-any-return]

    def after(mod: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        saved = replaced.pop() if replaced else None
        if saved is not None:
            mod._parameters.update(saved[0])
            mod.__dict__.update(saved[1])
        if output is None:  # the forward raised
            strategy.interrupted(mod)
            return None
        return strategy._prepare_output_fn(strategy.output_layouts, strategy.use_local_output, mod, output, mesh)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


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
    module: nn.Module, strategy: TensorParallelLayer, views: Mapping[str, ParamShard], rank: int
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
    widths = {name: even(width, strategy.size).widths[rank] for name, width in strategy.widths.items()}
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
