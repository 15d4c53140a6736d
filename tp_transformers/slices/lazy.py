"""Lazy tensors: a shape, a dtype and a way to read any slice, without data.

Selecting from a lazy tensor returns a lazy tensor; nothing is read until the loader needs values.
`Resident` is a tensor in memory, `Deferred` is computed in full when needed. `stored` has the tensors in files,
`composed` the stacks, transposes, ... of lazy tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from .layout import Range


class ReadStep(Protocol):
    """A step of a read: it writes values to a destination, or changes the values that earlier steps wrote."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""

    def fill(self, destination: torch.Tensor) -> None:
        """Write the values to `destination`, or change its values in place."""


class LazyTensor(ABC):
    """A tensor without data. `select` returns a lazy tensor, and reads nothing. `==` compares identities.

    A subclass overrides `materialize`, or `read_steps` if the tensor is computed from other lazy tensors.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Select the half-open index `ranges` of `dim`, in that order."""

    def materialize(self) -> torch.Tensor:
        """Read the values: a contiguous CPU tensor of `shape` and `dtype`."""
        result = torch.empty(self.shape, dtype=self.dtype)
        for step, view in self.read_steps(result):
            step.fill(view)
        return result

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        """Yield (step, view of `destination`) pairs, in the order to fill them. `destination` has `shape`."""
        yield self, destination

    def fill(self, destination: torch.Tensor) -> None:
        """Write the values to `destination`, of the same shape and any strides, device and dtype."""
        destination.copy_(self.materialize())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


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
