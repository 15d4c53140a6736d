"""Data parallelism beside tensor parallelism: copies of a tensor-parallel model that train on batches of their own.

Two ways over the other axis of a mesh:

    replicate    every copy holds the whole of its shards; gradients are averaged at the end of a backward
    shard        FSDP2 cuts dim 0 of every rank's shards once more, gathers a layer while it computes, and scatters
                 its averaged gradients

Both take what a rank holds as it is, DTensor or plain, so that neither cares how a plan cuts. Where the ranks that
share a model have batches of their own (`tp_batch_sharded`), what is outside the modules that gather them has copies on
these ranks, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..anatomy.layers import layers_of
from ..errors import MeshError, UnsupportedError, describe
from ..ranks.group import TP_AXIS, TensorParallelGroup
from ..ranks.mesh import check_ranks
from ..strategies import ParamShard, batch_sharded, local_tensor, shard_of
from .averaging import Average, outside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def data_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    mode: Literal["replicate", "shard"] = "replicate",
    axis: str = "dp",
    **options: Any,
) -> PreTrainedModel:
    """Train `model` on a batch of its own for every rank of the data-parallel axis; all ranks have to call it.

    All copies start with the parameters and buffers of the first (one broadcast each). After a backward every gradient
    is the mean of those of all copies, as the gradient of the mean of their losses is.

    With `replicate`, gradients are averaged at the end of a backward from the model's outputs, 32 MiB an all-reduce,
    DTensors and plain tensors alike; a parameter that only some copies used counts as zero on the others. Nothing
    overlaps with the backward. Optimizers and checkpoints see the parameters that were there before.

    Ranks that share a model which was loaded with `tp_batch_sharded` count as copies of what is outside the modules
    that gather their batches: it has the mean over all ranks then, and with `shard` it is cut over those of the mesh's
    later axis and copied over the other.

    With `shard`, FSDP2's `fully_shard` is applied to every decoder layer, then to the model. A DTensor parameter
    becomes a DTensor over both axes. A plain one (whole, uneven heads, replicated KV heads), which is no DTensor over
    the `tp` axis, becomes a `Shard(0)` DTensor of this rank's values over the data-parallel axis alone: its own
    `full_tensor()` is then this rank's tensor-parallel shard, `tp_transformers.full_tensor` the whole of either. Make
    optimizers after it, since the parameters are new.

    Gradients are averaged in their own dtype, or in the `tp_reduce_dtype` that the model was loaded with; with `shard`,
    an `mp_policy` of your own comes first.

    `model.set_requires_gradient_sync(False)` lets gradients add up without communication, in either mode, until it is
    set back to True and the next backward averages what has added up.

    Args:
        model: a model loaded with `tp_plan` and `device_mesh=mesh`.
        mesh: a mesh with the axes `axis` and `tp`.
        mode: "replicate" or "shard".
        axis: name of the data-parallel axis.
        **options: of `fully_shard` (`mp_policy`, `offload_policy`, `reshard_after_forward`). By default a layer's
            parameters are freed after its forward, the root's too.

    Returns:
        The model itself.

    Raises:
        MeshError: where the mesh has no such axis, or its `tp` axis is not the one that the model is split over.
        UnsupportedError: for a model without a plan, one that is data-parallel already, or an unknown mode.
    """
    group: TensorParallelGroup | None = getattr(model, "tp_group", None)
    if group is None:
        raise UnsupportedError("data_parallel needs a model that was loaded with tp_plan")
    with group.agree():
        _check_mesh(group, mesh, axis)
    process_group = mesh[axis].get_group()
    copies = TensorParallelGroup(mesh[axis], mesh[axis].get_local_rank(), process_group.size(), group.device)
    fault = next(filter(None, copies.gather(_fault(model, mode, options))), None)
    with group.agree():
        if fault is not None:
            raise UnsupportedError(fault)
    if any(batch_sharded(model)):
        _start_alike((*outside(model), *model.buffers()), group.process_group)
    _start_alike((*model.parameters(), *model.buffers()), process_group)
    copy = dataclasses.replace(group, copies=ranks_of(mesh, axis), mesh=_both_axes(mesh, axis))
    for module in model.modules():
        if "tp_group" in module.__dict__:
            module.tp_group = copy  # type: ignore[assignment]
    if mode == "shard":
        _shard(model, copy, mesh, axis, options)
    else:
        sharing = group.process_group if any(batch_sharded(model)) else None
        average = Average(process_group, sharing, group.reduce_dtype)
        model.register_forward_hook(average.watch)
        model.set_requires_gradient_sync = average.set_requires_gradient_sync  # type: ignore[assignment]
    return model


@torch.no_grad()
def _start_alike(tensors: Iterable[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Give `tensors` the values of the group's first rank."""
    for tensor in tensors:
        local = local_tensor(tensor)
        for dim, stride in enumerate(local.stride()):
            if stride == 0:  # one value, seen several times
                local = local.narrow(dim, 0, min(1, local.shape[dim]))
        sent = local.contiguous()
        is_short = sent.ndim and sent.element_size() == 1  # float8 and bool, which not every backend sends
        dist.broadcast(sent.view(torch.uint8) if is_short else sent, group=process_group, group_src=0)
        if sent is not local:
            local.copy_(sent)


def ranks_of(mesh: DeviceMesh, axis: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of every copy of a model: those that share it, in the order of the `tp` axis."""
    both = _both_axes(mesh, axis)
    ranks = both.mesh if (both.mesh_dim_names or ())[0] == axis else both.mesh.T
    return tuple(map(tuple, ranks.tolist()))


def _both_axes(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh of `axis` and `tp` alone, in the order that they have in `mesh`."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name in (axis, TP_AXIS))]


def _check_mesh(group: TensorParallelGroup, mesh: DeviceMesh, axis: str) -> None:
    check_ranks(mesh)
    names = mesh.mesh_dim_names or ()
    if axis not in names or TP_AXIS not in names:
        raise MeshError(
            describe(
                "data_parallel",
                got=f"a mesh with the axes {names or 'without names'}",
                expected=f"the axes {axis!r} and {TP_AXIS!r}",
                fix=f'Build it with init_device_mesh(type, shape, mesh_dim_names=("{axis}", "tp")).',
            )
        )
    if mesh[TP_AXIS].mesh.tolist() != group.global_ranks:
        raise MeshError(
            describe(
                "data_parallel",
                got=f"a mesh whose tp axis is ranks {mesh[TP_AXIS].mesh.tolist()}",
                expected=f"ranks {group.global_ranks}, over which the model is split",
                fix="Load the model with device_mesh=mesh.",
            )
        )


def _fault(model: nn.Module, mode: str, options: dict[str, Any]) -> str | None:
    if mode not in ("replicate", "shard") or (mode == "replicate" and options):
        return describe(
            "data_parallel",
            got=f"mode={mode!r}" + (f" with {', '.join(sorted(options))}" if options else ""),
            expected='"replicate", or "shard" with options of fully_shard',
            fix="Leave them out, or pass the other mode.",
        )
    if hasattr(model, "set_requires_gradient_sync"):
        return "data_parallel: the model is data-parallel already"
    return None


def _shard(model: nn.Module, group: TensorParallelGroup, mesh: DeviceMesh, axis: str, options: dict[str, Any]) -> None:
    blocks = list(batch_sharded(model))
    alone = set(outside(model)) if blocks else set()
    # What has copies on all ranks is cut over those of the later axis, and copied over the other.
    both = _both_axes(mesh, axis) if blocks else mesh[axis]
    shards = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        shard = shard_of(param)
        if shard is None and not isinstance(param, DTensor):  # added after the load: each rank has the whole
            shard = ParamShard(param.shape, None, group, use_dtensor=False)
        if shard is not None:
            copies = both.get_group(both.ndim - 1) if param in alone else mesh[axis].get_group()
            shards[name] = dataclasses.replace(shard, data_parallel=copies)
    _unwrap(model, alone)
    options.setdefault("reshard_after_forward", True)
    if group.reduce_dtype is not None:
        options.setdefault("mp_policy", MixedPrecisionPolicy(reduce_dtype=group.reduce_dtype))
    for tied in _tied(blocks):
        fully_shard(tied, mesh=mesh[axis], **options)
    for layer in layers_of(model):
        fully_shard(layer, mesh=both, **options)
    fully_shard(model, mesh=both, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":  # gloo knows no mean
            getattr(module, "set_force_sum_reduction_for_comms", lambda _: None)(True)
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in shards:
            param.tp_shard = shards[name]  # type: ignore[attr-defined]


def _tied(modules: Iterable[nn.Module]) -> Iterable[list[nn.Module]]:
    """The modules, those together that share a parameter."""
    first: dict[nn.Parameter, nn.Module] = {}
    together: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        params = list(module.parameters())
        other = next((first[param] for param in params if param in first), module)
        first.update(dict.fromkeys(params, other))
        together.setdefault(other, []).append(module)
    return together.values()


def _unwrap(model: nn.Module, params: Collection[nn.Parameter]) -> None:
    """Put plain parameters in place of those `params` that are DTensors over the `tp` axis alone."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in params and isinstance(param, DTensor):
                if param not in plain:
                    plain[param] = nn.Parameter(local_tensor(param).detach(), requires_grad=param.requires_grad)
                module._parameters[name] = plain[param]
