"""Attributes of a shard, as those of the full tensor: shape, data and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...strategies.shards.tensors import is_sharded, know, local_values
from ...torch_api import as_torch
from .functions import SHAPES, name_of
from .pickled import check_pickled
from .values import assign


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
