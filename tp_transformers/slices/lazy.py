"""Lazy tensors: a shape, a dtype and a way to read any slice, without data.

Slicing a lazy tensor returns a lazy tensor; nothing is read until the loader or a torch operation needs values.
`Resident` is a tensor in memory, `Deferred` is computed in full when needed. `stored` has the tensors in files,
`composed` the stacks, transposes, ... of lazy tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..torch_api import tree_map
from .layout import Range


class ReadStep(Protocol):
    """A step of a read: it writes values to a destination, or changes the values that earlier steps wrote."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""

    def fill(self, destination: torch.Tensor) -> None:
        """Write the values to `destination`, or change its values in place."""


class LazyTensor(ABC):
    """A tensor without data. Slicing (`tensor[2:4, ..., 1:]`) returns a lazy tensor, and reads nothing.

    Any other operation of a tensor (other indices, methods, arithmetic, torch functions) first reads the values.
    `==` compares identities.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Select the half-open index `ranges` of `dim`, in that order."""

    @abstractmethod
    def materialize(self) -> torch.Tensor:
        """Read the values: a contiguous CPU tensor of `shape` and `dtype`."""

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        """Yield (step, view of `destination`) pairs, in the order to fill them. `destination` has `shape`."""
        yield self, destination

    def fill(self, destination: torch.Tensor) -> None:
        """Write the values to `destination`, of the same shape and any strides, device and dtype."""
        destination.copy_(self.materialize())

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        """Return `self`: materialized values are always contiguous."""
        return self

    def to(self, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return `self` for the same dtype or None; otherwise read the values, then cast or move them."""
        if not args and not kwargs and dtype in (None, self.dtype):
            return self
        return self.materialize().to(dtype, *args, **kwargs)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Slices of step 1 and `...` return a lazy tensor. An integer reads its slice, any other index the tensor."""
        items = index if isinstance(index, tuple) else (index,)
        if not all(
            item is Ellipsis or isinstance(item, int) or (isinstance(item, slice) and item.step in (None, 1))
            for item in items
        ) or any(isinstance(item, bool) for item in items):
            return self.materialize()[index]
        torch.empty(self.shape, device="meta")[index]  # raises IndexError on an index out of range
        if Ellipsis in items:
            position = items.index(Ellipsis)
            missing = self.ndim - (len(items) - 1)
            items = items[:position] + (slice(None),) * missing + items[position + 1 :]
        result: LazyTensor = self
        dropped = []
        for dim, item in enumerate(items):
            if isinstance(item, slice):
                start, stop, _ = item.indices(self.shape[dim])
                if (start, stop) != (0, self.shape[dim]):
                    result = result.select(dim, [(start, max(start, stop))])
            else:
                start = item + self.shape[dim] if item < 0 else item
                result = result.select(dim, [(start, start + 1)])
                dropped.append(dim)
        if not dropped:
            return result
        return result.materialize().squeeze(tuple(dropped))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda leaf: leaf.materialize() if isinstance(leaf, LazyTensor) else leaf, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _reading(name: str) -> Callable[..., Any]:
    def operator(self: LazyTensor, *args: Any) -> Any:
        args = tuple(arg.materialize() if isinstance(arg, LazyTensor) else arg for arg in args)
        return getattr(self.materialize(), name)(*args)

    return operator


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(LazyTensor, f"__{_name}__", _reading(f"__{_name}__"))
    setattr(LazyTensor, f"__r{_name}__", _reading(f"__r{_name}__"))
for _name in ("neg", "abs", "invert", "lt", "le", "gt", "ge", "bool", "float", "int"):
    setattr(LazyTensor, f"__{_name}__", _reading(f"__{_name}__"))


class Resident(LazyTensor):
    """A tensor in memory (from the caller's `state_dict`, or the result of a converter)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Resident:
        """Slice the tensor; one range returns a view."""
        views = [self.tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        return Resident(views[0] if len(views) == 1 else torch.cat(views, dim))

    def materialize(self) -> torch.Tensor:
        return self.tensor.contiguous()


class Deferred(LazyTensor):
    """A tensor that is computed in full when its values are read (a converter without a rule for slices)."""

    def __init__(self, compute: Callable[[], torch.Tensor], *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.compute, self.shape, self.dtype = compute, torch.Size(shape), dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Deferred:
        """Record the slice; it is applied to the computed value."""
        shape = list(self.shape)
        shape[dim] = sum(stop - start for start, stop in ranges)
        return Deferred(lambda: Resident(self.compute()).select(dim, ranges).tensor, shape=shape, dtype=self.dtype)

    def materialize(self) -> torch.Tensor:
        """Compute the full value, then apply the slices."""
        return self.compute().contiguous()
