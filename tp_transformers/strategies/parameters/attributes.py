"""Attributes of a shard (shape, data, gradient), and copying, pickling and printing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...torch_api import as_torch
from .functions import SHAPES, name_of
from .sharded import PICKLED, assign, check_pickled, is_sharded, know, local_values, position


def _shape(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return SHAPES[name_of(func)](torch.empty(tensor.tp_shard.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)


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
        grad = know(shard.own(grad).clone() if is_full else grad, tensor)
    with as_torch():
        func(tensor, grad)


def _copy_deeply(func: Any, tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy to a shard with the same layout and ranks."""
    if id(tensor) not in memo:
        copied = memo[id(tensor)] = know(local_values(tensor).detach().clone(), tensor)
        copied.requires_grad_(tensor.requires_grad)
        if getattr(tensor, "_is_param", False):  # torch's parameters are copied without a gradient
            copied._is_param = True
        elif tensor.grad is not None:
            copied.grad = tensor.grad.clone()
    return memo[id(tensor)]


def _reduce(func: Any, tensor: Any, *args: Any) -> Any:
    """Pickle as a DTensor, or as an ordinary tensor, of this rank's shard, with the shard's position."""
    with as_torch():
        if isinstance(tensor, DTensor):
            plain: Any = DTensor.__new__(DTensor, tensor._local_tensor, tensor._spec, requires_grad=False)
        else:
            plain = tensor.detach()
    PICKLED.put(plain, position(tensor.tp_shard))
    return plain.__reduce_ex__(*args)


def _show(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> str:
    shard = tensor.tp_shard
    with as_torch():
        values = repr(local_values(tensor).detach())
    return f"Shard of rank {shard.group.rank} of {shard.group.size}, of {tuple(shard.shape)}: {values}"


ATTRIBUTES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(SHAPES, _shape),
    "alias": lambda func, tensor: local_values(tensor),
    "data_ptr": lambda func, tensor: local_values(tensor).data_ptr(),
    "untyped_storage": lambda func, tensor: local_values(tensor).untyped_storage(),
    "data": _get,
    "data =": lambda func, tensor, value: assign(tensor, value),
    "grad": _get,
    "grad =": _set_grad,
    "__deepcopy__": _copy_deeply,
    "__reduce_ex__": _reduce,
    "__repr__": _show,
}
"""{name of a function: its handler here, called by `computing`}."""
