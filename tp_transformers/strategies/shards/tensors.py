"""Tensors that hold this rank's shard of a parameter: a DTensor, or a plain tensor if no placement describes it.

The forward of a sharded module computes with the `_local_tensor` of its parameters. Code outside of a forward, such as
an optimizer, computes on a shard itself: by `Feature.computes`, or without a feature as `_on_values` does.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...marks import Mark, untyped
from ...ranks.collectives import apply_pair
from ...seams import Compute, features, first
from ...torch_api import TorchDispatchMode, TracingContext, as_torch, tree_leaves, tree_map

PICKLED: Mark[dict[str, Any]] = Mark("tp_pickled")
"""On a shard that was pickled, the rank that held it and its indices in the full tensor; `torch.load` restores it."""


class Sharded:
    """A tensor that holds this rank's shard: `tp_shard`, a `ParamShard`."""

    __slots__ = ()
    tp_shard: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as `Feature.computes` says; torch.compile computes on this rank's values."""
        # torch.compile traces code, builds guards and fake tensors for its inputs, or runs the code that it generated.
        is_compiled = torch.compiler.is_compiling() or TracingContext.try_get() is not None or _is_generated()
        if is_compiled:
            with as_torch():
                return func(*args, **(kwargs or {}))
        return computes()(cls, func, args, kwargs or {})

    def __copy__(self) -> Any:
        """`copy.copy`: the same shard in the same memory. The default would pickle it."""
        return _with_values(self, local_values(self).detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy to a shard with the same layout and ranks; torch's parameters are copied without a gradient."""
        if id(self) not in memo:
            copied = memo[id(self)] = _with_values(self, local_values(self).detach().clone())
            grad = untyped(self).grad
            if grad is not None and not getattr(self, "_is_param", False):
                copied.grad = grad.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor, or as an ordinary tensor, of this rank's shard, with the shard's position."""
        with as_torch():
            if isinstance(self, DTensor):
                plain: Any = DTensor.__new__(DTensor, self._local_tensor, self._spec, requires_grad=False)
            else:
                plain = untyped(self).detach()
        PICKLED.put(plain, self.tp_shard.position)
        return plain.__reduce_ex__(protocol)


class ShardTensor(Sharded, Tensor):
    """A plain tensor that holds this rank's shard: of uneven or replicated heads, of complete experts, ...

    `shape` is the shape of the full tensor. `torch.compile` sees this rank's values.
    """

    @property
    def _local_tensor(self) -> Tensor:
        """The shard as a detached ordinary tensor in the same memory; named like the attribute of DTensor."""
        if torch.compiler.is_compiling():
            local: Tensor = torch.ops.aten.alias.default(self)  # which a graph can call on the shard
            return local
        with as_torch():
            return self.detach()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shard = self.tp_shard
        with as_torch():
            values = repr(self.detach())
        return f"Shard of rank {shard.group.rank} of {shard.group.size}, of {tuple(shard.shape)}: {values}"

    def set_(self, *source: Any) -> Any:
        """`torch.Tensor.set_`, which does not call `__torch_function__` by itself."""
        return type(self).__torch_function__(Tensor.set_, (), (self, *source))


class ShardDTensor(Sharded, DTensor):
    """A DTensor over the `tp` axis that holds this rank's shard. With other DTensors it computes as torch's DTensor."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Any:
        result = DTensor.__tensor_unflatten__(inner, spec, size, stride)
        result.__class__ = ShardDTensor
        return result


HAS_LOCAL = (ShardTensor, DTensor)
"""Tensor classes that keep this rank's values in `_local_tensor`."""


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
    shard = like.tp_shard
    if type(result) is Tensor and tuple(result.shape) == shard.local_shape:
        with as_torch():
            return as_shard(laid_out(result, like), type(like), shard)
    has_layout = isinstance(like, DTensor) and type(result) is DTensor and result.placements == like.placements
    return as_shard(result, type(like), shard) if has_layout and result.shape == shard.shape else result


def as_shard(local: Tensor, kind: type, shard: Any) -> Any:
    """Turn `local` into a shard of class `kind`, in place."""
    untyped(local).__class__ = kind
    untyped(local).tp_shard = shard
    return local


def local_values(tensor: Any) -> Tensor:
    """Return this rank's values as an ordinary tensor; gradients flow back to `tensor`."""
    with as_torch():
        recorded = tensor.requires_grad and torch.is_grad_enabled()
        if isinstance(tensor, DTensor):
            local: Tensor = tensor.to_local() if recorded else tensor._local_tensor
        else:
            local = tensor.view_as(tensor) if recorded else tensor.detach()
        return local


def own_values(full: Tensor, shard: Any) -> Tensor:
    """Return this rank's slice of a replicated tensor; gradients flow back to `full`."""
    is_recorded = full.requires_grad and torch.is_grad_enabled()
    return apply_pair(full, take_own, gather, shard) if is_recorded else shard.own(full)  # type: ignore[no-any-return]


def take_own(full: Tensor, shard: Any) -> Tensor:
    """A copy of this rank's slice of a replicated full tensor."""
    return shard.own(full).clone()  # type: ignore[no-any-return]


def gather(local: Tensor, shard: Any) -> Tensor:
    """The full tensor, of this rank's values: those of a `Sharded` tensor, as gradients of sums of shards are."""
    return shard.full(local_values(local) if is_sharded(local) else local)  # type: ignore[no-any-return]


# -- outside of a forward


def _with_values(tensor: Any, local: Tensor) -> Any:
    """A shard like `tensor` with the values `local`."""
    copied = know(local, tensor).requires_grad_(tensor.requires_grad)
    if getattr(tensor, "_is_param", False):
        copied._is_param = True
    return copied


def _is_generated() -> bool:
    """True in a call by code that Inductor generated, which drops `alias` and takes a shard as local values."""
    frame = sys._getframe(2)
    for _ in range(3):  # calling an operator adds a frame
        if frame is None or "extern_kernels" in frame.f_globals:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


@cache
def computes() -> Compute:
    """How a torch function computes on shards: as the first feature that has a way, else as `_on_values`."""
    return first((feature.computes() for feature in features().values()), _on_values)


def _on_values(kind: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute as DTensor if `kind` is one, else on this rank's values, and elementwise alone."""
    like = next(leaf for leaf in tree_leaves((args, kwargs)) if is_sharded(leaf))
    with as_torch():
        if issubclass(kind, DTensor):
            result = func(*args, **kwargs)
        else:
            with _Elementwise():
                result = func(*args, **kwargs)
    return tree_map(lambda leaf: know(leaf, like), result)


class _Elementwise(TorchDispatchMode):  # type: ignore[misc]
    """Lets operators run whose values at an index depend on values at this index alone; all others raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises UnsupportedError for an operator that needs the full tensor."""
        name = func.__name__.partition(".")[0]
        is_list = name.startswith(_OF_LISTS) and name not in ("_foreach_max", "_foreach_norm")
        if torch.Tag.pointwise in func.tags or name in _COPIES or is_list:
            return func(*args, **(kwargs or {}))
        raise UnsupportedError(
            f"{name} on a tensor-parallel parameter",
            got="this rank's shard",
            expected="the full tensor",
            fix="Gather one with tp_transformers.full_tensor(param).",
        )


_COPIES = frozenset(("_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "fill_", "zero_", "zeros_like"))
"""Elementwise operators that torch does not tag as pointwise."""
_OF_LISTS = ("_foreach_", "_fused_")
