"""Lazy tensors: a shape, a dtype and a way to read any slice, but no data.

Slicing a lazy tensor returns another one; nothing is read until the loader (or any torch operation) asks for values.
`Resident` is a tensor that is already in memory, `Deferred` is computed whole when needed. Tensors in files are in
`stored`, those that are made of others (stacks, transposes, ...) in `composed`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..torch_api import tree_map
from .layout import Range


class Leaf(Protocol):
    """A leaf writes values into a destination, or changes those that earlier leaves wrote, once all are read."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""

    def fill(self, destination: torch.Tensor) -> None:
        """Put the values into `destination`, or change those that are there."""


class LazyTensor(ABC):
    """A tensor without data. Slices (`tensor[2:4, ..., 1:]`) are lazy tensors again, and read nothing.

    Anything else that a tensor can do (other indices, methods, arithmetic, torch functions) first reads the values:
    correct everywhere, lazy where it matters. `==` compares identities.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """The lazy tensor that keeps the half-open index `ranges` of `dim`, in that order."""

    @abstractmethod
    def materialize(self) -> torch.Tensor:
        """Read the values: a contiguous CPU tensor of `shape` and `dtype`."""

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """Leaves that fill `destination` (of `shape`), in their order, each with the view that it fills."""
        yield self, destination

    def fill(self, destination: torch.Tensor) -> None:
        """Put the values into `destination`, of the same shape, but of any strides, device and dtype."""
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
        """Itself: the result is always contiguous."""
        return self

    def to(self, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> Any:
        """Itself for its own dtype or none; the values, cast or moved, for anything else."""
        if not args and not kwargs and dtype in (None, self.dtype):
            return self
        return self.materialize().to(dtype, *args, **kwargs)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Slices of step 1 and `...` give a lazy tensor; an integer reads its slice, any other index everything."""
        items = index if isinstance(index, tuple) else (index,)
        if not all(
            item is Ellipsis or isinstance(item, int) or (isinstance(item, slice) and item.step in (None, 1))
            for item in items
        ) or any(isinstance(item, bool) for item in items):
            return self.materialize()[index]
        torch.empty(self.shape, device="meta")[index]  # raises IndexError on what is out of range
        if Ellipsis in items:
            at = items.index(Ellipsis)
            missing = self.ndim - (len(items) - 1)
            items = items[:at] + (slice(None),) * missing + items[at + 1 :]
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
    """A tensor that is in memory already (a `state_dict` given by the caller, a converter's result)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Resident:
        """The same selection of the tensor; one range is a view."""
        parts = [self.tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        return Resident(parts[0] if len(parts) == 1 else torch.cat(parts, dim))

    def materialize(self) -> torch.Tensor:
        return self.tensor.contiguous()


class Deferred(LazyTensor):
    """A tensor that is computed in full when first needed (a converter that slices cannot be pushed through)."""

    def __init__(self, compute: Callable[[], torch.Tensor], *, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.compute, self.shape, self.dtype = compute, torch.Size(shape), dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Deferred:
        """Remember the selection; it is applied to the computed value."""
        shape = list(self.shape)
        shape[dim] = sum(stop - start for start, stop in ranges)
        return Deferred(lambda: Resident(self.compute()).select(dim, ranges).tensor, shape=shape, dtype=self.dtype)

    def materialize(self) -> torch.Tensor:
        """Compute the whole value, then select."""
        return self.compute().contiguous()
