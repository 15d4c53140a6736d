"""FSDP2 over copies of a tensor-parallel model: shards each rank's shards again along dim 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...anatomy import stacks
from ...marks import untyped
from ...ranks.group import TensorParallelGroup
from ...ranks.mesh import both_axes
from ...slices.layout import Layout, Range, chunked
from ...strategies import SHARD, ParamShard, batch_sharded, local_tensor, shard_of
from ...strategies.shards.gather import on_all, on_first
from ...strategies.shards.tensors import ShardTensor
from .averaging import outside


@dataclasses.dataclass(frozen=True, eq=False)
class PartOfShard(ParamShard):
    """A rank's part of its shard, which is sharded over `resharded_over` along dim 0, in torch.chunk's sizes."""

    @property
    def _parts(self) -> Layout | None:
        """Layout of the shard over `resharded_over`; None for a scalar."""
        return Layout(0, chunked(self.local_shape[0], dist.get_world_size(self.resharded_over))) if self.shape else None

    @property
    def rows(self) -> Range:
        assert self._parts is not None
        return self._parts.split.ranges[dist.get_rank(self.resharded_over)][0]

    def own(self, full: Tensor) -> Tensor:
        return super().own(full)[slice(*self.rows)]

    def joined(self, local: Tensor) -> Tensor:
        if self._parts is None or self.resharded_over is None or 0 in self.local_shape:
            return local
        return on_all(local, self.local_shape, self._parts, self.resharded_over, self.group.device)

    def gather(self, local: Tensor) -> Tensor | None:
        """See `ParamShard.gather`; ranks of the first copy hold their complete shard meanwhile."""
        if self.layout is None and self.is_over_copies and self.group.rank:
            return None
        joined = on_first(local, self.local_shape, self._parts, self.resharded_over, self.group.device)
        return joined if joined is None or self.layout is None else super().gather(joined)


def shard_copies(
    model: nn.Module, group: TensorParallelGroup, mesh: DeviceMesh, axis: str, options: dict[str, Any]
) -> None:
    blocks = list(batch_sharded(model))
    alone = set(outside(model)) if blocks else set()
    # Parameters that are replicated on all ranks are sharded over the last axis, and replicated over the other.
    both = both_axes(mesh, axis) if blocks else mesh[axis]
    shards = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        shard = shard_of(param)
        if shard is None and not isinstance(param, DTensor):  # added after the load: replicated
            shard = ParamShard(param.shape, None, group, use_dtensor=False)
        if shard is not None:
            copies = both.get_group(both.ndim - 1) if param in alone else mesh[axis].get_group()
            fields = {field.name: getattr(shard, field.name) for field in dataclasses.fields(shard) if field.init}
            shards[name] = PartOfShard(**{**fields, "resharded_over": copies})
    _unwrap(model, alone)
    options.setdefault("reshard_after_forward", True)
    if group.reduce_dtype is not None:
        options.setdefault("mp_policy", MixedPrecisionPolicy(reduce_dtype=group.reduce_dtype))
    for tied in _tied(blocks):
        fully_shard(tied, mesh=mesh[axis], **options)
    for layer in layers_of(model):
        fully_shard(layer, mesh=both, **options)
    fully_shard(model, mesh=both, **options)
    by_gloo = f"{mesh.device_type}:gloo" in dist.get_backend_config(mesh[axis].get_group())
    for module in model.modules():
        if isinstance(module, FSDPModule) and by_gloo:  # it has no mean reduction
            getattr(module, "set_force_sum_reduction_for_comms", lambda _: None)(True)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in shards:
            SHARD.put(param, shards[name])
    _open_units(model)


def _open_units(model: nn.Module) -> None:
    """Let every module inside an FSDP unit gather the unit's parameters when the module is called by itself."""
    root = untyped(model)._get_fsdp_state()

    def visit(module: nn.Module, unit: _Unit) -> None:
        for child in module.children():
            if isinstance(child, FSDPModule):
                child.register_forward_pre_hook(unit.begin, prepend=True)
                visit(child, _Unit(root, child._get_fsdp_state()))
            elif next(child.parameters(), None) is not None:
                child.register_forward_pre_hook(unit.enter, prepend=True, with_kwargs=True)
                child.register_forward_hook(unit.leave, always_call=True)
                visit(child, unit)

    visit(model, _Unit(root, root))


class _Unit:
    """An FSDP unit, gathered by calls of its inner modules too: `get_decoder()(ids)`, `lm_head(states)`."""

    def __init__(self, root: Any, state: Any) -> None:
        self.root, self.state = root, state
        self.entered: nn.Module | None = None
        """The inner module whose call has gathered the unit."""

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of another unit in this one: make `model` the root, whichever unit is called first."""
        self.root._lazy_init()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of an inner module: gather the unit, unless a forward or a recomputation has done so."""
        if torch.compiler.is_compiling() or self.state._training_state.name == "FORWARD":
            return None
        self.root._lazy_init()
        inputs = self.state._pre_forward(module, args, kwargs)
        self.entered = module if self.state._training_state.name == "FORWARD" else None
        return inputs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of an inner module, also after an error: free what `enter` gathered.

        A backward gathers the unit again before it reaches an output that a user's hook may have stored.
        """
        if self.entered is not module:
            return self.state._register_pre_backward_hook(output) if len(module._forward_hooks) > 1 else None
        self.entered = None
        return self.state._post_forward(module, args, output)


def _tied(modules: Iterable[nn.Module]) -> Iterable[list[nn.Module]]:
    """Group the modules; those that share a parameter are in one group."""
    first: dict[nn.Parameter, nn.Module] = {}
    groups: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        params = list(module.parameters())
        representative = next((first[param] for param in params if param in first), module)
        first.update(dict.fromkeys(params, representative))
        groups.setdefault(representative, []).append(module)
    return groups.values()


def _unwrap(model: nn.Module, params: Collection[nn.Parameter]) -> None:
    """Replace plain shards, and those `params` that are DTensors over the `tp` axis, by ordinary parameters."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(param, ShardTensor) or (param in params and isinstance(param, DTensor)):
                if param not in plain:
                    plain[param] = nn.Parameter(local_tensor(param).detach(), requires_grad=param.requires_grad)
                module._parameters[name] = plain[param]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, inner ones first; FSDP wraps each of them.

    They are the modules that transformers keeps on one device (`_no_split_modules`), or else the entries of the
    outermost module lists.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in kinds]
    return (named or [layer for _, stack in stacks(model) for layer in stack])[::-1]
