"""Parameters that are shards and know it, so that other people's code computes on them as on the full tensor.

    p.shape, p.numel()             of the full tensor
    p.mul_(2), p + full, p.grad    by value: each rank computes on its shard, and takes its own part of `full`
    p.normal_(), randn_like(p)     every rank draws the full tensor, and keeps its own part
    p.norm(), svd(p), h @ p.T      all ranks gather the full tensor, and compute the same; backward takes the own slice
    p[2].zero_(), p.view(-1)       a view of the full tensor; a change of it reaches the shards

A forward of a module that is cut sees local tensors, so that nothing of this runs there. `computing` has the rules.
"""

from __future__ import annotations

import sys
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...marks import untyped
from ...patches import Patch, Undo, nothing, replace, replace_all
from ...torch_api import TracingContext, as_torch, tree_leaves
from .computing import compute, is_for_dtensor
from .sharded import Shard, Sharded, as_shard, assign, full_values, is_sharded, know, traced_values


def _is_traced() -> bool:
    """True while torch.compile traces code, or describes the tensors that it is given."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def _is_generated() -> bool:
    """True in a call by code of Inductor's, where a shard is this rank's values: it drops the `alias` of one."""
    frame = sys._getframe(2)
    for _ in range(3):  # a call of an operator is one more frame
        if frame is None or "extern_kernels" in frame.f_globals:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ShardTensor(Sharded, Tensor):
    """A plain tensor that holds this rank's shard: of uneven or replicated heads, of experts that are not cut, ...

    `shape` is that of the full tensor. `torch.compile` sees the values that this rank holds.
    """

    @property
    def _local_tensor(self) -> Tensor:
        """The shard as an ordinary tensor in the same memory, detached; called as that of a DTensor is."""
        if torch.compiler.is_compiling():
            return traced_values(self)
        with as_torch():
            return self.detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute by value, or on full tensors; see the module."""
        if _is_traced() or _is_generated():
            with as_torch():
                return func(*args, **(kwargs or {}))
        return compute(func, args, kwargs or {})

    def set_(self, *source: Any) -> Any:
        """`torch.Tensor.set_`, which knows no `__torch_function__`; a tensor may be full, or this rank's values."""
        if len(source) == 1 and isinstance(source[0], Tensor):
            assign(self, source[0])
            return self
        with as_torch():
            return super().set_(*source)


class ShardDTensor(Sharded, DTensor):
    """A DTensor over the `tp` axis that holds this rank's shard.

    With other DTensors it computes as torch's do; alone, or with ordinary tensors that are full and the same on all
    ranks, as a `ShardTensor`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as a DTensor does among DTensors, else as the full tensor."""
        kwargs = kwargs or {}
        if _is_traced():
            with as_torch():
                return func(*args, **kwargs)
        if not is_for_dtensor(func, args, kwargs):
            return compute(func, args, kwargs)
        with as_torch():
            result = func(*args, **kwargs)
        if type(result) is DTensor:
            know(result, next(leaf for leaf in tree_leaves((args, kwargs)) if is_sharded(leaf)))
        return result

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Any:
        found = DTensor.__tensor_unflatten__(inner, spec, size, stride)
        found.__class__ = ShardDTensor
        return found


HAS_LOCAL = (ShardTensor, DTensor)
"""Classes of tensors with this rank's values in `_local_tensor`."""


def plain_parameter(local: Tensor, shard: Shard, *, requires_grad: bool) -> nn.Parameter:
    """A parameter of the values that this rank holds, in the memory of `local`."""
    param = as_shard(local.detach().requires_grad_(requires_grad), ShardTensor, shard)
    param._is_param = True
    return untyped(param)  # type: ignore[no-any-return]


def _set(original: Any, parameter: Tensor, values: Tensor) -> None:
    if is_sharded(parameter):
        assign(parameter, values)
    else:
        original(parameter, values)


ASSIGNED_VALUES = Patch(
    "torch", "remove_parametrizations", lambda: replace(nn.utils.parametrize, "_maybe_set", _set), without=nothing
)
"""Lets `remove_parametrizations` leave its values in a shard; torch swaps it with the full tensor, and cannot."""


def _bytes_of(original: Any, tensor: Tensor, *args: Any) -> Any:
    return original(full_values(tensor).detach() if is_sharded(tensor) else tensor, *args)


def _write_full() -> Undo:
    older = [name for name in ("_to_ndarray", "_tobytes") if hasattr(safetensors.torch, name)]
    return replace_all((safetensors.torch, name, _bytes_of) for name in older or ["_to_ndarray"])


FULL_BYTES = Patch("safetensors", "save_file", _write_full)
"""Lets `safetensors.torch.save_file` write full tensors; it reads a tensor's memory in the length of its shape."""
