"""Data parallelism over copies of a tensor-parallel model.

Both modes use this rank's tensors, DTensor or plain, whatever the plan.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ...anatomy import check_values
from ...errors import MeshError, UnsupportedError, describe
from ...marks import untyped
from ...model.parallelize import WRAPPED
from ...ranks.direct import connect
from ...ranks.group import GROUP, TP_AXIS, TensorParallelGroup
from ...ranks.mesh import both_axes, check_ranks, ranks_of_copies
from ...strategies import batch_sharded
from ..watch.calls import watch_copies
from .averaging import Average, broadcast, outside
from .fsdp import shard_copies


def data_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    mode: Literal["replicate", "shard"] = "replicate",
    axis: str = "dp",
    **options: Any,
) -> PreTrainedModel:
    """Train copies of `model` on different batches, one for each rank of the data-parallel axis. Collective.

    All copies start with the parameters and buffers of the first (one broadcast each). After a backward every gradient
    is the mean over all copies: the gradient of the mean of their losses.

    With `replicate`, gradients of DTensors and plain tensors are averaged during a backward from the model's outputs,
    in all-reduces of 32 MiB. A parameter that only some copies used counts as zero on the others.

    In a model that was loaded with `tp_batch_sharded`, the modules that do not gather samples are replicated over all
    ranks: their gradients are averaged over all ranks, and `shard` shards them over the mesh's last axis and replicates
    them over the other.

    With `shard`, FSDP2's `fully_shard` is applied to every decoder layer, then to the model. A DTensor parameter
    becomes a DTensor over both axes, a plain one a `Shard(0)` DTensor of this rank's values over the data-parallel axis
    alone. Make optimizers afterwards, since the parameters are new.

    Gradients are averaged in their own dtype, or in the `tp_reduce_dtype` that the model was loaded with; with `shard`,
    an explicit `mp_policy` takes precedence.

    `model.set_requires_gradient_sync(False)` accumulates gradients without communication, in either mode; after it is
    set to True, the next backward averages the accumulated gradients.

    Args:
        model: a model loaded with `tp_plan` and `device_mesh=mesh`.
        mesh: a mesh with the axes `axis` and `tp`.
        mode: "replicate" or "shard".
        axis: name of the data-parallel axis.
        **options: options of `fully_shard` (`mp_policy`, `offload_policy`, `reshard_after_forward`). By default
            parameters are freed after the forward, those of the root too.

    Returns:
        The model itself.

    Raises:
        MeshError: if the mesh has no such axis, or its `tp` axis is not the one that the model is sharded over.
        UnsupportedError: for a model without a plan, one that is data-parallel already, or an unknown mode.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("data_parallel needs a model that was loaded with tp_plan")
    copies = _join_copies(model, group, mesh, axis, mode, options)
    process_group = mesh[axis].get_group()
    if any(batch_sharded(model)):
        broadcast((*outside(model), *model.buffers()), group.process_group)
    broadcast((*model.parameters(), *model.buffers()), process_group)
    copy = dataclasses.replace(group, copies=ranks_of_copies(mesh, axis), mesh=both_axes(mesh, axis))
    for module in model.modules():
        if "tp_group" in module.__dict__:
            GROUP.put(module, copy)
    watch_copies(model, copies)
    if mode == "shard":
        shard_copies(model, copy, mesh, axis, options)
    else:
        sharing = group.process_group if any(batch_sharded(model)) else None
        average = Average(process_group, sharing, group.reduce_dtype)
        average.follow(model)
        untyped(model).set_requires_gradient_sync = average.set_requires_gradient_sync
    return model


def _join_copies(
    model: PreTrainedModel, group: TensorParallelGroup, mesh: DeviceMesh, axis: str, mode: str, options: dict[str, Any]
) -> TensorParallelGroup:
    """Return the group of ranks with the same shards in all copies. Raises on all ranks if a check fails on any."""
    with group.agree():
        _check_mesh(group, mesh, axis)
        check_values(model, "data_parallel")
    process_group = mesh[axis].get_group()
    connect(process_group)
    copies = TensorParallelGroup.of_mesh(mesh[axis], group.device)
    copies.check_same({"tp_shares": model.tp_resolution.plan.shares})
    fault = next(filter(None, copies.gather(_fault(model, mode, options))), None)
    with group.agree():
        if fault is not None:
            raise UnsupportedError(fault)
    return copies


def _check_mesh(group: TensorParallelGroup, mesh: DeviceMesh, axis: str) -> None:
    check_ranks(mesh)
    names = mesh.mesh_dim_names or ()
    if axis not in names or TP_AXIS not in names:
        raise MeshError(
            "data_parallel",
            got=f"a mesh with the axes {names or 'without names'}",
            expected=f"the axes {axis!r} and {TP_AXIS!r}",
            fix=f'Build it with init_device_mesh(type, shape, mesh_dim_names=("{axis}", "tp")).',
        )
    if mesh[TP_AXIS].mesh.tolist() != group.global_ranks:
        raise MeshError(
            "data_parallel",
            got=f"a mesh whose tp axis is ranks {mesh[TP_AXIS].mesh.tolist()}",
            expected=f"ranks {group.global_ranks}, over which the model is split",
            fix="Load the model with device_mesh=mesh.",
        )


def _fault(model: PreTrainedModel, mode: str, options: dict[str, Any]) -> str | None:
    if mode not in ("replicate", "shard") or (mode == "replicate" and options):
        return describe(
            "data_parallel",
            got=f"mode={mode!r}" + (f" with {', '.join(sorted(options))}" if options else ""),
            expected='"replicate", or "shard" with options of fully_shard',
            fix="Leave them out, or pass the other mode.",
        )
    if hasattr(model, "set_requires_gradient_sync"):
        return "data_parallel: the model is data-parallel already"
    if WRAPPED.name in model.__dict__:
        return describe(
            "data_parallel",
            got="a model whose prompts are parameters of the PeftModel around the model",
            expected="a model with all parameters that are trained",
            fix="Call tp_transformers.data_parallel(peft_model, mesh).",
        )
    if mode == "shard" and model.tp_resolution.keeps_order:
        got, fix = 'mode="shard" of a model with tp_invariant', 'Pass mode="replicate".'
        return describe("data_parallel", got=got, expected="gradients in the order of one process", fix=fix)
    return None
