"""torch functions on shards: computed on local values where possible, else on gathered full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...errors import TensorParallelError, UnsupportedError
from ...marks import Mark
from ...strategies.shards.tensors import is_sharded, know, local_values, own_values
from ...torch_api import as_torch, tree_leaves, tree_map, tree_map_only, version_of
from .functions import DRAWS_LIKE, FILLS, MAKES, OF_LISTS, READS, SHAPES, fits, is_elementwise, is_in_place, name_of
from .values import ATTRIBUTES, empty_full, full_values, write


def compute_on(kind: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on shards of class `kind`: as DTensor if other DTensors are arguments, else by `compute`."""
    if not issubclass(kind, DTensor) or not _is_for_dtensor(func, args, kwargs):
        return compute(func, args, kwargs)
    with as_torch():
        result = func(*args, **kwargs)
    if type(result) is DTensor:
        know(result, _shards_in(args, kwargs)[0])
    return result


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute `func(*args, **kwargs)` on arguments with shards, with the result that full tensors give."""
    name = name_of(func)
    first: Any = args[0] if args else kwargs.get("tensor")
    if name in ATTRIBUTES and is_sharded(first):
        return ATTRIBUTES[name](func, *args, **kwargs)
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    is_autograd = getattr(func, "__module__", None) == "torch.autograd"
    if name in READS or is_autograd or (is_attribute and name not in _VIEWS):
        with as_torch():
            return func(*args, **kwargs)
    if name.startswith(OF_LISTS):
        return _by_tensor(func, args, kwargs)
    if name in FILLS and is_sharded(first):
        return _fill(func, first, args[1:], {key: value for key, value in kwargs.items() if key != "tensor"})
    if name in MAKES and is_sharded(first):
        return func(local_values(first), *args[1:], **kwargs)
    if name in DRAWS_LIKE:
        with as_torch():
            drawn = func(empty_full(first), *args[1:], **kwargs)
        return know(first.tp_shard.own(drawn).clone(), first)
    if name in _RESHAPES and is_sharded(first) and _keeps_shape(first, args[1:]):
        with as_torch():
            return know(local_values(first), first)
    if name in _LIKE_ANOTHER and not is_sharded(first):
        rest = (empty_full(argument) if is_sharded(argument) else argument for argument in args[1:])
        with as_torch():
            return func(first, *rest, **kwargs)
    shards = _shards_in(args, kwargs)
    if _is_elementwise(name, shards, args, kwargs):
        return _elementwise(func, shards[0], first if is_in_place(name) else None, args, kwargs)
    return _on_full(func, args, kwargs)


def _is_for_dtensor(func: Any, args: Any, kwargs: Any) -> bool:
    """True if DTensor has to compute `func`: it reads metadata, or other DTensors such as activations are arguments."""
    name = name_of(func)
    if name in ATTRIBUTES and name not in SHAPES:
        return False
    dtensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor) and not is_sharded(leaf))
    return name in READS or name in SHAPES or any(dtensor.ndim for dtensor in dtensors)


def _shards_in(*values: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(values) if is_sharded(leaf)]


# -- elementwise


def _is_elementwise(name: str, shards: Sequence[Any], args: Any, kwargs: Any) -> bool:
    """True if `name` is elementwise, all shards have one layout, and all other tensors broadcast to them."""
    is_search = name == "where" and len(args) + len(kwargs) < 3
    if not is_elementwise(name) or is_search or kwargs.get("out") is not None:
        return False
    if is_in_place(name) and not is_sharded(args[0]):
        return False
    shard = shards[0].tp_shard
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not is_sharded(leaf)]
    return all(like.tp_shard.shape == shard.shape and like.tp_shard.layout == shard.layout for like in shards) and all(
        fits(tensor.shape, shard.shape) or tuple(tensor.shape) == shard.local_shape for tensor in tensors
    )


def _elementwise(func: Any, like: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Compute on local values; `target` is the tensor that the function changes in place, or None."""
    shard = like.tp_shard
    full, local = tuple(shard.shape), shard.local_shape

    def to_local(leaf: Any) -> Any:
        if is_sharded(leaf):
            return leaf if leaf is target and not isinstance(leaf, DTensor) else local_values(leaf)
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) == local != full:
            return leaf
        values = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        is_recorded = values.requires_grad and torch.is_grad_enabled()
        return own_values(values.expand(full), shard) if is_recorded or values.numel() > 1 else values

    args, kwargs = tree_map(to_local, (args, kwargs))
    with as_torch():
        result = func(*args, **kwargs)
    if target is not None:
        if isinstance(target, DTensor):
            torch.autograd.graph.increment_version(target)
        return target
    return tree_map(lambda leaf: know(leaf, like), result)


def _by_tensor(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """Apply a function of lists tensor by tensor, since a list may mix shards and ordinary tensors."""
    count, base = len(args[0]), func.__name__.removeprefix("_foreach_")
    is_update = not func.__name__.startswith("_foreach_")

    def at(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

    results: list[Any] = []
    for index in range(count):
        tensor_args = [at(value, index) for value in args]
        tensor_kwargs = {key: at(value, index) for key, value in kwargs.items()}
        shards = _shards_in(tensor_args, tensor_kwargs)
        if not shards:
            results += func(*tensor_args, **tensor_kwargs) or ()
            continue
        target = tensor_args[0][0] if is_in_place(base) else None
        if is_update or _is_elementwise(base, shards, [tensor_args[0][0], *tensor_args[1:]], tensor_kwargs):
            result = _elementwise(func, shards[0], target, tensor_args, tensor_kwargs)
        else:
            result = _on_full(func, tensor_args, tensor_kwargs)
        results += result if target is None else ()
    return results or None


# -- random numbers


def _fill(func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Fill a full tensor, as one process does, and keep this rank's shard."""
    of_init = getattr(func, "__module__", None) == "torch.nn.init"
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled() and not of_init:
        with as_torch():
            return func(tensor, *args, **kwargs)  # raises: a leaf that requires grad is changed in place
    full = torch.empty_like(empty_full(tensor))
    func(full, *args, **kwargs)
    with torch.no_grad():
        write(tensor, full)
    return tensor


# -- on full tensors


def _on_full(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather full tensors on all ranks and compute; a parameter that the function changes takes this rank's shard."""
    gathered: dict[int, tuple[Any, Tensor, int]] = {}

    def gather(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        if id(leaf) not in gathered:
            full = full_values(leaf)
            gathered[id(leaf)] = leaf, full, version_of(full)
        return gathered[id(leaf)][1]

    name, first = name_of(func), args[0] if args else None
    full_args = tree_map(gather, (args, kwargs))
    with as_torch():
        result = func(*full_args[0], **full_args[1])
    is_unversioned = is_in_place(name) and (name in _UNVERSIONED or torch.is_inference_mode_enabled())
    for shard, full, version in gathered.values():
        if version_of(full) == version and not (is_unversioned and shard is first):
            continue
        if full.shape != shard.tp_shard.shape:
            raise UnsupportedError(
                f"{name} on a tensor-parallel parameter",
                got=f"another shape, {tuple(full.shape)}",
                expected=f"that of the parameter, {tuple(shard.tp_shard.shape)}",
                fix="Make a tensor of that shape with tp_transformers.full_tensor(param).",
            )
        with torch.no_grad():
            write(shard, full)
        result = shard if result is full else result
    result = _without_writes(result, [full for _, full, _ in gathered.values()])
    if name == "__getitem__" and isinstance(result, GatheredView) and WRITES_PARTS.get():
        PART.put(result, args)
    return result


WRITES_PARTS: ContextVar[bool] = ContextVar("tp_transformers_writes_parts", default=False)
"""True while a model is loaded: transformers' classes initialise parts of parameters, `weight[padding_idx]`."""
PART: Mark[tuple[Tensor, Any]] = Mark("tp_part")
"""On a view that was made then: the parameter, and the index of the view."""


class GatheredView(Tensor):
    """A view of a full tensor that was gathered from shards; a write to the view raises TensorParallelError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as torch does."""
        kwargs, name = kwargs or {}, name_of(func)
        leaves = tree_leaves((args, kwargs))
        if any(is_sharded(leaf) for leaf in leaves):
            return compute(func, args, kwargs)
        views = [leaf for leaf in leaves if isinstance(leaf, GatheredView)]
        is_written = (is_in_place(name) and name not in READS) or kwargs.get("inplace")
        targets = (args[:1] or kwargs.get("tensor")) if is_written else None
        if any(isinstance(leaf, GatheredView) for leaf in tree_leaves((targets, kwargs.get("out")))):
            part = PART.find(args[0]) if args else None
            if part is None:
                raise _read_only(name)
            param, index = part
            param[index] = value = func(args[0].as_subclass(Tensor), *args[1:], **kwargs)
            return value
        if name in ("__deepcopy__", "__reduce_ex__"):
            return func(args[0].as_subclass(Tensor), *args[1:])
        mesh = next((leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)), None)
        if mesh is not None:
            args, kwargs = tree_map_only(GatheredView, partial(_replicated, mesh=mesh), (args, kwargs))
        with as_torch():
            before = [version_of(view) for view in views]
            result = func(*args, **kwargs)
            if before != [version_of(view) for view in views]:
                raise _read_only(name)
        return _without_writes(result, views)


def _read_only(name: str) -> TensorParallelError:
    """The error for a write to a view. torch's parametrizations would ignore a NotImplementedError."""
    return TensorParallelError(
        f"{name} on a part of a tensor-parallel parameter",
        got="a write to a gathered copy, which the shards would not see",
        expected="a change of the parameter itself, such as param.mul_(2) or param.copy_(full)",
        fix="Write inside of `with tp_transformers.training.full_parameters(model):`.",
    )


def _replicated(full: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(full.as_subclass(Tensor), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _without_writes(result: Any, gathered: Sequence[Tensor]) -> Any:
    """Return `result` with views of `gathered` tensors as `GatheredView`, and NumPy arrays read-only."""

    def mark(leaf: Any) -> Any:
        if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() in storages:
            return leaf.as_subclass(GatheredView)
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
        return leaf

    with as_torch():
        storages = {full.untyped_storage().data_ptr() for full in gathered}
        return tree_map(mark, result)


def _keeps_shape(tensor: Any, args: Any) -> bool:
    """True if `args` of a reshape are the shape that the full tensor already has."""
    shape: Any = args[0] if len(args) == 1 else args
    shape = shape.shape if isinstance(shape, Tensor) else shape
    return isinstance(shape, list | tuple) and tuple(shape) == tuple(tensor.tp_shard.shape)


_UNVERSIONED = frozenset(("apply_", "map2_", "map_"))
"""In-place functions that do not increment the version counter."""
_RESHAPES = frozenset(("expand", "expand_as", "reshape", "reshape_as", "view", "view_as"))
_LIKE_ANOTHER = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))
"""Methods that read only the shape, dtype or device of their other argument."""
_VIEWS = frozenset(("H", "T", "imag", "mH", "mT", "real"))
"""Attributes that are views."""
