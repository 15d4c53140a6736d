"""Tensors that hold a rank's shard of a full tensor, and conversions between shard and full tensor."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError, UnsupportedError
from ...marks import Mark, untyped
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Layout
from ...torch_api import as_torch


class Shard(Protocol):
    """The shard that a rank holds of a full tensor: a `ParamShard`."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""

    @property
    def layout(self) -> Layout | None:
        """Indices that each rank holds."""

    @property
    def group(self) -> TensorParallelGroup:
        """The group of ranks."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""

    @property
    def rows(self) -> tuple[int, int]:
        """Range of indices of dim 0 of this rank's shard that FSDP leaves on this rank."""

    def full(self, local: Tensor) -> Tensor:
        """Gather the full tensor on every rank."""

    def own(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor."""


class Sharded:
    """A tensor that holds this rank's shard; see `tensors`."""

    __slots__ = ()
    tp_shard: Shard

    def __copy__(self) -> Any:
        """`copy.copy`: the same shard in the same memory. The default would pickle it."""
        copied = know(local_values(self).detach(), self).requires_grad_(untyped(self).requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        return copied


def is_sharded(value: object) -> TypeGuard[Any]:
    """True if `value` is a `Sharded` tensor."""
    return isinstance(value, Sharded)


def laid_out(local: Tensor, param: Tensor) -> Tensor:
    """Return `local`, this rank's shard, as a DTensor if `param` is one, else unchanged."""
    if isinstance(param, DTensor):
        layout: dict[str, Any] = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        return DTensor.from_local(local, param.device_mesh, param.placements, **layout)
    return local


def know(result: Any, like: Any) -> Any:
    """Mark `result` as a shard if it has the local shape (or placements) of the shard `like`; else return it as is."""
    if not is_sharded(like) or not hasattr(like, "tp_shard"):  # fake tensors of torch.compile have no tp_shard
        return result
    shard, is_dtensor = like.tp_shard, isinstance(like, DTensor)
    if is_dtensor and type(result) is Tensor and tuple(result.shape) == shard.local_shape:
        with as_torch():
            result = laid_out(result, like)
    if is_dtensor:
        has_layout = type(result) is DTensor and result.placements == like.placements and result.shape == shard.shape
    else:
        has_layout = type(result) is Tensor and tuple(result.shape) == shard.local_shape
    return as_shard(result, type(like), shard) if has_layout else result


def as_shard(local: Tensor, kind: type, shard: Shard) -> Any:
    """Turn `local` into a shard of class `kind`, in place."""
    untyped(local).__class__ = kind
    untyped(local).tp_shard = shard
    return local


# -- between a shard and the full tensor


def local_values(tensor: Any) -> Tensor:
    """Return this rank's values as an ordinary tensor; gradients flow back to `tensor`."""
    with as_torch():
        recorded = tensor.requires_grad and torch.is_grad_enabled()
        if isinstance(tensor, DTensor):
            local: Tensor = tensor.to_local() if recorded else tensor._local_tensor
        else:
            local = tensor.view_as(tensor) if recorded else tensor.detach()
        return local


def traced_values(tensor: Any) -> Tensor:
    """`local_values` of a plain shard, as an operator that a graph of torch.compile can call on the shard."""
    local: Tensor = torch.ops.aten.alias.default(tensor)
    return local


def full_values(tensor: Any) -> Tensor:
    """Gather the full tensor on every rank, as an ordinary tensor; gradients flow back to `tensor`."""
    full: Tensor = _Full.apply(local_values(tensor), tensor.tp_shard)
    return full


def own_values(full: Tensor, shard: Shard) -> Tensor:
    """Return this rank's slice of a replicated tensor; gradients flow back to `full`."""
    local: Tensor = _Own.apply(full, shard) if full.requires_grad and torch.is_grad_enabled() else shard.own(full)
    return local


class _Full(torch.autograd.Function):
    """Gather a full tensor on all ranks; backward: own slice of the replicated gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.full(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.own(grad).clone(), None


class _Own(torch.autograd.Function):
    """Take this rank's slice of a replicated full tensor; backward: gather the gradient."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard.own(full).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The gradient of a sum of shards is passed on unchanged, so it may be a `Sharded` tensor.
        return ctx.shard.full(local_values(grad) if is_sharded(grad) else grad), None


def empty_full(tensor: Any) -> Tensor:
    """Return a tensor of the full shape that takes no memory (an expanded element)."""
    with as_torch():
        return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.tp_shard.shape)


def version_of(tensor: Tensor) -> int:
    """The version of a tensor, which counts changes in place; one that was made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def write(tensor: Any, full: Tensor) -> None:
    """Copy this rank's slice of `full` into `tensor`."""
    local = tensor.tp_shard.own(full)
    with as_torch():
        if isinstance(tensor, DTensor):
            tensor._local_tensor.copy_(local.detach())
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(local)


FULL: Mark[nn.Parameter] = Mark("tp_full")
"""On a parameter, the full parameter that replaces it in `full_parameters`: the same object in every block."""
IS_OPEN: Mark[bool] = Mark("tp_is_open")
"""On a full parameter, True in a `full_parameters` block, and False after the block, when the parameter is empty."""
PICKLED: Mark[dict[str, Any]] = Mark("tp_pickled")
"""On a shard that was pickled, the rank that held it and its indices in the full tensor; `torch.load` restores it."""


def position(shard: Shard) -> dict[str, Any]:
    """The rank and indices of a shard, in the types that `torch.load(weights_only=True)` allows."""
    layout, rank = shard.layout, shard.group.rank
    indices = None if layout is None else (layout.dim, layout.split.ranges[rank])
    return {"rank": rank, "size": shard.group.size, "indices": (tuple(shard.shape), indices, tuple(shard.rows))}


def check_pickled(value: Any, param: Any, shard: Shard, name: str) -> None:
    """Raise CheckpointError if `value`, for the `shard` that `param` is, was pickled by a rank with another shard."""
    pickled = PICKLED.find(value)
    if pickled is None:
        if not (isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements == param.placements):
            return
        theirs, ours = (
            {"rank": mesh.get_coordinate(), "size": tuple(mesh.shape), "indices": None}
            for mesh in (value.device_mesh, param.device_mesh)
        )
        is_own = theirs == ours
    else:
        theirs, ours = pickled, position(shard)
        is_own = theirs["indices"] == ours["indices"]
    if not is_own:
        raise CheckpointError(
            f"state of {name}",
            got=f"the shard of rank {theirs['rank']} of {theirs['size']}",
            expected=f"the shard of rank {ours['rank']} of {ours['size']}, or the full tensor",
            fix="torch.save writes the state of one rank: let every rank save and load a file of its own, or save by "
            "save_pretrained and torch.distributed.checkpoint.",
        )


def assign(tensor: Any, value: Tensor) -> None:
    """Replace the data of a shard: `value` is a full tensor or this rank's shard; a full tensor is sliced to a copy.

    Raises UnsupportedError for another shape and, if `tensor` is a DTensor, for another dtype.
    """
    shard = tensor.tp_shard
    check_pickled(value, tensor, shard, "a parameter")
    if is_sharded(value) and value.tp_shard.layout == shard.layout:
        local = local_values(value).detach()
    else:
        full = full_values(value) if is_sharded(value) else value.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        shape, is_full = tuple(full.shape), tuple(full.shape) == tuple(shard.shape)
        if not is_full and shape != shard.local_shape:
            raise UnsupportedError(
                "data of a tensor-parallel parameter",
                got=f"shape {shape}",
                expected=f"the full shape {tuple(shard.shape)}, or this rank's {shard.local_shape}",
                fix="Assign a tensor of one of these shapes.",
            )
        local = shard.own(full).clone() if is_full else full
    with as_torch():
        if not isinstance(tensor, DTensor):
            tensor.data = local
        elif local.dtype == tensor.dtype:
            tensor._local_tensor = local.as_subclass(Tensor)
        else:
            raise UnsupportedError(
                "data of a tensor-parallel parameter",
                got=str(local.dtype),
                expected=str(tensor.dtype),
                fix="Cast the model with model.to(dtype).",
            )
