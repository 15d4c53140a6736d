"""torch functions on shards: computed on local values where possible, else on gathered full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...errors import UnsupportedError
from ...marks import untyped
from ...torch_api import as_torch, tree_leaves, tree_map, tree_map_only
from .attributes import ATTRIBUTES
from .functions import DRAWS_LIKE, FILLS, MAKES, OF_LISTS, READS, SHAPES, fits, is_elementwise, is_in_place, name_of
from .sharded import (
    WATCHERS,
    empty_full,
    full_values,
    has_changed,
    is_sharded,
    know,
    local_values,
    memory_of,
    own_values,
    version_of,
    write,
)


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


def is_for_dtensor(func: Any, args: Any, kwargs: Any) -> bool:
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
        has_changed(target)
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
    """Gather full tensors on all ranks and compute; write tensors that the function changed back to their shards."""
    sources: dict[int, tuple[Source, int]] = {}

    def gather(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        if id(leaf) not in sources:
            source = _gathered(leaf)
            sources[id(leaf)] = source, version_of(source.full)
        return sources[id(leaf)][0].full

    full_args = tree_map(gather, (args, kwargs))
    with as_torch():
        result = func(*full_args[0], **full_args[1])
    is_unversioned = is_in_place(name_of(func)) and (name_of(func) in _UNVERSIONED or torch.is_inference_mode_enabled())
    for key, (source, version) in sources.items():
        full, is_target = source.full, is_unversioned and key == id(args[0])
        if version_of(full) == version and not is_target:
            continue
        if full.shape != source.shard.tp_shard.shape:
            raise UnsupportedError(
                f"{name_of(func)} on a tensor-parallel parameter",
                got=f"another shape, {tuple(full.shape)}",
                expected=f"that of the parameter, {tuple(source.shard.tp_shard.shape)}",
                fix="Make a tensor of that shape with tp_transformers.full_tensor(param).",
            )
        source.write()
        result = source.shard if result is full else result
    return _views(result, [source for source, _ in sources.values()])


def _gathered(shard: Any) -> Source:
    """Gather the full tensor that views of `shard` share, or a new one that passes gradients back.

    Other ranks may have dropped their views, so that it is gathered on every call.
    """
    if not (shard.requires_grad and torch.is_grad_enabled()):
        for source in WATCHERS:
            is_usable = source.full.is_inference() == torch.is_inference_mode_enabled()
            if is_usable and source.memory == memory_of(shard):
                source.refresh()
                return source  # type: ignore[no-any-return]
    return Source(shard, full_values(shard))


class Gathered(Tensor):
    """A view of a full tensor that was gathered from shards.

    An in-place change is written to the shards. If the shards have changed, the view is gathered again before its use.
    """

    tp_source: Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as torch does; after an in-place change, write each rank's shard."""
        kwargs, name = kwargs or {}, name_of(func)
        if _shards_in(args, kwargs):
            return compute(func, args, kwargs)
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Gathered)]
        sources = list(dict.fromkeys(view.tp_source for view in views))
        if name not in READS and name not in SHAPES:
            for source in sources:
                if source.is_stale:
                    source.refresh()
        meshes = [leaf.device_mesh for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        if meshes:
            args, kwargs = tree_map_only(Gathered, partial(_replicated, mesh=meshes[0]), (args, kwargs))
        with as_torch():
            before = [version_of(view) for view in views]
            result = func(*args, **kwargs)
            changed = [view for view, version in zip(views, before, strict=True) if version_of(view) != version]
            if views and (views[0].is_inference() or name in _UNVERSIONED) and is_in_place(name):
                changed = views[:1]
        for source in dict.fromkeys(view.tp_source for view in changed):
            source.write()
        return _views(result, sources)


def _replicated(full: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(full.as_subclass(Tensor), mesh, [Replicate()] * mesh.ndim, run_check=False)


class Source:
    """A gathered full tensor and its shard on this rank."""

    def __init__(self, shard: Any, full: Tensor) -> None:
        self.shard, self.full, self.is_stale = shard, full, False
        self.memory = memory_of(shard)

    def refresh(self) -> None:
        """Gather the shards again (on all ranks), into the same memory if they have changed.

        Otherwise it stays, since a backward may need it.
        """
        with torch.no_grad(), as_torch():
            full = full_values(self.shard)
            if self.is_stale or not torch.equal(full, self.full):
                with torch.inference_mode(self.full.is_inference()):
                    self.full.copy_(full)
        self.is_stale = False

    def write(self) -> None:
        """Copy this rank's slice of the full tensor to the shard."""
        with torch.no_grad():
            write(self.shard, self.full)
        self.is_stale = False


def _views(result: Any, sources: Sequence[Source]) -> Any:
    """Return `result` with views of full tensors as `Gathered`, and NumPy arrays read-only."""
    with as_torch():
        by_storage = {source.full.untyped_storage().data_ptr(): source for source in sources}

    def mark(leaf: Any) -> Any:
        if type(leaf) is Tensor and not leaf.requires_grad:
            source = by_storage.get(leaf.untyped_storage().data_ptr())
            if source is not None:
                WATCHERS.add(source)
                untyped(leaf).__class__ = Gathered
                untyped(leaf).tp_source = source
        elif isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
        return leaf

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
