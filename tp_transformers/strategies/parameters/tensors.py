"""Sharded parameters that other code can use as if they were the full tensor.

    p.shape, p.numel()             of the full tensor
    p.mul_(2), p + full, p.grad    elementwise: each rank computes on its shard and its slice of `full`
    p.normal_(), randn_like(p)     every rank draws the full tensor and keeps its shard
    p.norm(), svd(p), h @ p.T      all ranks gather the full tensor and compute the same; backward: own slice
    p[2], p.view(-1)               a view of a gathered copy; a write to the view raises an error

The forward of a sharded module uses local tensors and runs none of this. `computing` has the rules.
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
from ...torch_api import TracingContext, as_torch, memory_of, tree_leaves
from .computing import compute, is_for_dtensor
from .sharded import Shard, Sharded, as_shard, assign, full_values, is_sharded, know, local_values, traced_values


def _is_traced() -> bool:
    """True while torch.compile traces code or builds guards and fake tensors for its inputs."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def _is_generated() -> bool:
    """True in a call by code that Inductor generated, which drops `alias` and takes a shard as local values."""
    frame = sys._getframe(2)
    for _ in range(3):  # calling an operator adds a frame
        if frame is None or "extern_kernels" in frame.f_globals:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ShardTensor(Sharded, Tensor):
    """A plain tensor that holds this rank's shard: of uneven or replicated heads, of complete experts, ...

    `shape` is the shape of the full tensor. `torch.compile` sees this rank's values.
    """

    @property
    def _local_tensor(self) -> Tensor:
        """The shard as a detached ordinary tensor in the same memory; named like the attribute of DTensor."""
        if torch.compiler.is_compiling():
            return traced_values(self)
        with as_torch():
            return self.detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute elementwise on shards, or on full tensors; see the module docstring."""
        if _is_traced() or _is_generated():
            with as_torch():
                return func(*args, **(kwargs or {}))
        return compute(func, args, kwargs or {})

    def set_(self, *source: Any) -> Any:
        """`torch.Tensor.set_`, which does not call `__torch_function__`; `source` may be full or this rank's shard."""
        if len(source) == 1 and isinstance(source[0], Tensor):
            assign(self, source[0])
            return self
        with as_torch():
            return super().set_(*source)


class ShardDTensor(Sharded, DTensor):
    """A DTensor over the `tp` axis that holds this rank's shard.

    With other DTensors it computes as torch's DTensor. Alone, or with replicated ordinary tensors, it computes as a
    `ShardTensor`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as DTensor if other DTensors are arguments, else as `ShardTensor`."""
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
        result = DTensor.__tensor_unflatten__(inner, spec, size, stride)
        result.__class__ = ShardDTensor
        return result


HAS_LOCAL = (ShardTensor, DTensor)
"""Tensor classes that keep this rank's values in `_local_tensor`."""


def plain_parameter(local: Tensor, shard: Shard, *, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of this rank's shard in the memory of `local`."""
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
