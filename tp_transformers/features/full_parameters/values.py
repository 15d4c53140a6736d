"""Full tensors from shards, and shards from full tensors, with gradients; attributes of a shard as of the full one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError, UnsupportedError
from ...patches import Patch, Undo, nothing, replace, replace_all
from ...ranks.collectives import apply_pair
from ...strategies.shards.shard import ParamShard, local_tensor
from ...strategies.shards.tensors import HAS_LOCAL, PICKLED, gather, is_sharded, know, local_values, take_own
from ...torch_api import as_torch, memory_of
from .functions import SHAPES


def check_pickled(value: Any, param: Any, shard: ParamShard, name: str) -> None:
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
        theirs, ours = pickled, shard.position
        is_own = theirs["indices"] == ours["indices"]
    if not is_own:
        raise CheckpointError(
            f"state of {name}",
            got=f"the shard of rank {theirs['rank']} of {theirs['size']}",
            expected=f"the shard of rank {ours['rank']} of {ours['size']}, or the full tensor",
            fix="torch.save writes the state of one rank: let every rank save and load a file of its own, or save by "
            "save_pretrained and torch.distributed.checkpoint.",
        )


def full_values(tensor: Any) -> Tensor:
    """Gather the full tensor on every rank, as an ordinary tensor; gradients flow back to `tensor`."""
    return apply_pair(local_values(tensor), gather, take_own, tensor.tp_shard)


def empty_full(tensor: Any) -> Tensor:
    """Return a tensor of the full shape that takes no memory (an expanded element)."""
    with as_torch():
        return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.tp_shard.shape)


def write(tensor: Any, full: Tensor) -> None:
    """Copy this rank's slice of `full` into `tensor`."""
    local = tensor.tp_shard.own(full)
    with as_torch():
        if isinstance(tensor, DTensor):
            tensor._local_tensor.copy_(local.detach())
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(local)


def own_shard(value: Tensor, shard: ParamShard, param: Tensor) -> Tensor | None:
    """This rank's shard of `value`, detached: a slice of a full value, copied, or a value in the layout of `param`.

    None for a value of another shape, and for a DTensor of other placements. Collective for a shard of another layout.
    """
    if is_sharded(value):
        local = local_values(value).detach()
        if value.tp_shard.layout == shard.layout:
            return local
        value = value.tp_shard.full(local)
    elif isinstance(value, DTensor):
        if value.placements == (param.placements if isinstance(param, DTensor) else (shard.placement,)):
            return local_tensor(value)
        if not all(place.is_replicate() for place in value.placements):
            return None
        value = local_tensor(value)
    value = value.detach()
    if value.shape == shard.shape:
        own = shard.own(value)
        return own if own.shape == value.shape else own.clone()
    return value if value.shape == local_tensor(param).shape else None


def assign(tensor: Any, value: Tensor) -> None:
    """Replace the data of a shard: `value` is a full tensor or this rank's shard; a full tensor is sliced to a copy.

    Raises UnsupportedError for another shape and, if `tensor` is a DTensor, for another dtype.
    """
    shard = tensor.tp_shard
    check_pickled(value, tensor, shard, "a parameter")
    if isinstance(value, DTensor) and not is_sharded(value):
        value = value.full_tensor()
    local, name = own_shard(value, shard, tensor), "data of a tensor-parallel parameter"
    if local is None:
        expected = f"the full shape {tuple(shard.shape)}, or this rank's {shard.local_shape}"
        fix = "Assign a tensor of one of these shapes."
        raise UnsupportedError(name, got=f"shape {tuple(value.shape)}", expected=expected, fix=fix)
    if isinstance(tensor, DTensor) and local.dtype != tensor.dtype:
        fix = "Cast the model with model.to(dtype)."
        raise UnsupportedError(name, got=str(local.dtype), expected=str(tensor.dtype), fix=fix)
    with as_torch():
        if isinstance(tensor, DTensor):
            tensor._local_tensor = local.as_subclass(Tensor)
        else:
            tensor.data = local


def _shape(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return func(torch.empty(tensor.tp_shard.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)


def _get(func: Any, tensor: Any) -> Any:
    """`data` or `grad`."""
    with as_torch():
        value = func(tensor)
    return know(value, tensor)


def _set_grad(func: Any, tensor: Any, grad: Any) -> None:
    shard = tensor.tp_shard
    if isinstance(grad, Tensor) and not isinstance(grad, DTensor) and not is_sharded(grad):
        check_pickled(grad, tensor, shard, "a gradient")
        is_full = tuple(grad.shape) == tuple(shard.shape)
        grad = know(shard.own(grad).clone() if is_full else grad, tensor)  # not detached: of `create_graph`
    with as_torch():
        func(tensor, grad)


def _set_values(func: Any, tensor: Any, *source: Any) -> Any:
    """`source` may be one tensor, full or this rank's shard."""
    if len(source) == 1 and isinstance(source[0], Tensor):
        assign(tensor, source[0])
        return tensor
    with as_torch():
        return func(tensor, *source)


ATTRIBUTES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SHAPES, _shape),
    "alias": lambda func, tensor: local_values(tensor),
    "data_ptr": lambda func, tensor: local_values(tensor).data_ptr(),
    "untyped_storage": lambda func, tensor: local_values(tensor).untyped_storage(),
    "data": _get,
    "data =": lambda func, tensor, value: assign(tensor, value),
    "grad": _get,
    "grad =": _set_grad,
    "set_": _set_values,
}
"""{name of a function: its handler here, called by `computing`}."""


def _set(original: Any, parameter: Tensor, values: Tensor) -> None:
    if is_sharded(parameter):
        assign(parameter, values)
    else:
        original(parameter, values)


ASSIGNED_VALUES = Patch(
    "torch", "remove_parametrizations", lambda: replace(nn.utils.parametrize, "_maybe_set", _set), without=nothing
)
"""Lets `remove_parametrizations` write its result to a shard; torch would swap in the full tensor and fail."""


def _bytes_of(original: Any, tensor: Tensor, *args: Any) -> Any:
    return original(full_values(tensor).detach() if is_sharded(tensor) else tensor, *args)


def _find_duplicates(original: Any, state: Any, **options: Any) -> Any:
    """Find names of one tensor in a state of shards by the memory of the shards, which need not fill a storage."""
    if any(isinstance(value, HAS_LOCAL) for value in state.values()):
        tensors: dict[Any, Tensor] = {}
        state = {
            name: tensors.setdefault(memory_of(local_values(value)), torch.empty(1)) for name, value in state.items()
        }
    return original(state, **options)


def _write_full() -> Undo:
    older = [name for name in ("_to_ndarray", "_tobytes") if hasattr(safetensors.torch, name)]
    changes = [(safetensors.torch, name, _bytes_of) for name in older or ["_to_ndarray"]]
    return replace_all([*changes, (safetensors.torch, "_remove_duplicate_names", _find_duplicates)])


FULL_BYTES = Patch("safetensors", "save_file", _write_full)
"""Lets `safetensors.torch.save_file` write full tensors; it would read past the end of a shard's memory.

`safetensors.torch.load_model` finds tied shards."""
