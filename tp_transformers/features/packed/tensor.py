"""A packed weight in the place of a parameter during a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...torch_api import as_torch, make_wrapper_subclass, take, top_saved_tensors_hooks, tree_leaves, tree_map
from .weight import HeldWeight, PackedWeight

unsafe_view = take("torch.ops.aten._unsafe_view")
"""Return a result in another shape; unlike a view, the result may be changed in place and recorded."""


class PackedTensor(Tensor):
    """A tensor that `linear` and `matmul` multiply packed, and that all other operations see decoded.

    An index of dim 0 selects one of several experts, and decodes nothing.
    """

    held: HeldWeight

    @staticmethod
    def __new__(cls, held: HeldWeight) -> PackedTensor:
        tensor: PackedTensor = make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply packed in `linear` and `matmul`; see the class."""
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with as_torch():
                return func(*args, **kwargs)
        is_product = (func is linear or func in _MATMULS) and len(args) > 1 and kwargs.keys() <= {"bias"}
        if is_product and isinstance(args[1], PackedTensor) and type(args[0]) is Tensor:
            weight = args[1].held if func is linear else _transposed(args[1].held)
            is_cast = torch.is_autocast_enabled(args[0].device.type)  # to another dtype than that of the weight
            if weight is not None and not is_cast:
                return _linear(args[0], weight, *args[2:], **kwargs)
        if func is Tensor.__getitem__ and _is_expert(*args):
            return PackedTensor(args[0].held.select(int(args[1])))
        return _decoded(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the decoded values."""
        return _decoded(func, args, kwargs or {})


_DESCRIBING = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "element_size", "is_floating_point", "__len__")),
}
"""Functions that need no values."""
_MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}


def _is_expert(weight: Any, index: Any) -> bool:
    """True for one index of experts (experts, out, in)."""
    is_index = isinstance(index, int) or (isinstance(index, Tensor) and not index.ndim and index.dtype == torch.int64)
    return is_index and weight.ndim == 3 and isinstance(weight.held, PackedWeight)


def _transposed(weight: HeldWeight) -> HeldWeight | None:
    """The matrix (in, out) as (out, in); None if it is no such matrix."""
    return weight.transposed if isinstance(weight, PackedWeight) and len(weight.shape) == 2 else None


def _linear(x: Tensor, held: HeldWeight, bias: Tensor | None = None) -> Tensor:
    tokens = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Linear.apply(tokens, held)
    else:
        y = held.linear(tokens)
    y = unsafe_view(y, [*x.shape[:-1], held.shape[0]])
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    """The product with a packed weight; the backward decodes the weight, and nothing decoded is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: HeldWeight) -> Tensor:
        ctx.held = held
        return held.linear(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.held.decoded(), None


def _decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with decoded weights. If it is recorded, the backward decodes them again."""
    packed = {id(leaf): leaf.held for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PackedTensor)}
    values = {key: held.decoded() for key, held in packed.items()}
    args, kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
    with _decoded_again({value.untyped_storage()._cdata: packed[key] for key, value in values.items()}):
        return func(*args, **kwargs)


@contextmanager
def _decoded_again(storages: Mapping[int, HeldWeight]) -> Iterator[None]:
    """Decode the weights in those `storages` again in the backward, instead of keeping them for it.

    If other hooks already save tensors for the backward, as activation checkpoints do, they handle these weights too.
    """
    if not torch.is_grad_enabled() or top_saved_tensors_hooks(False) is not None:
        yield
        return

    def keep(tensor: Tensor) -> Any:
        weight = storages.get(tensor.untyped_storage()._cdata)
        return tensor if weight is None else (weight, tensor.size(), tensor.stride(), tensor.storage_offset())

    def take(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        weight, *place = kept
        decoded: Tensor = weight.decoded()
        return decoded.as_strided(*place)

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        yield
