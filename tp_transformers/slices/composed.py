"""Stacks, concatenations and transposes of lazy tensors: data movement without arithmetic.

    Stack(A, B)        [A, B] along a new dim         MergeModulelist
    Concat(A, B)       AB along an existing dim       Concatenate
    Transpose(A)       A with two dims swapped
    Squeeze(A)         A without a dim of length 1

A chunk is a slice of one range (`select`), a permutation along a dim is a slice of many (`permute`). A new kind is one
subclass: `select` maps a slice of the result to slices of its sources, `read_steps` yields the view of the destination
that each source fills. So slices are read from the files straight into the destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch

from .layout import Range, joined, overlaps
from .lazy import LazyTensor, ReadStep, Resident
from .stored import Stored


class Stack(LazyTensor):
    """`torch.stack` of `tensors`, all of one shape, along a new `dim`: n of (..., m) -> (..., n, ..., m)."""

    def __init__(self, tensors: Sequence[LazyTensor], dim: int) -> None:
        """Raises ValueError if there are no tensors, or their shapes or dtypes differ."""
        _check_same("Stack", [(tensor.shape, tensor.dtype) for tensor in tensors])
        self.tensors, self.stack_dim = tensors, dim
        shape = tensors[0].shape
        self.shape = torch.Size((*shape[:dim], len(tensors), *shape[dim:]))
        self.dtype = tensors[0].dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Select tensors along the stacked dim; slice every tensor along another dim."""
        if dim == self.stack_dim:
            tensors = [tensor for start, stop in ranges for tensor in self.tensors[start:stop]]
            return Stack(tensors, dim) if tensors else _nothing(self, dim)
        inner = dim - (dim > self.stack_dim)
        return Stack([tensor.select(inner, ranges) for tensor in self.tensors], self.stack_dim)

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        """Each tensor fills one index of the stacked dim."""
        for index, tensor in enumerate(self.tensors):
            yield from tensor.read_steps(destination.select(self.stack_dim, index))


class Concat(LazyTensor):
    """`torch.cat` of `tensors` along `dim`; their shapes differ only in that dim."""

    def __init__(self, tensors: Sequence[LazyTensor], dim: int) -> None:
        """Raises ValueError if there are no tensors, or they differ in dtype or in the length of another dim."""
        _check_same("Concat", [(tensor.shape[:dim], tensor.shape[dim + 1 :], tensor.dtype) for tensor in tensors])
        self.tensors, self.concat_dim = tensors, dim
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        self.shape = torch.Size(shape)
        self.dtype = tensors[0].dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Slice every tensor; along the concatenated dim, keep the overlap of each tensor with the ranges."""
        if dim != self.concat_dim:
            return Concat([tensor.select(dim, ranges) for tensor in self.tensors], self.concat_dim)
        parts = groupby(overlaps([tensor.shape[dim] for tensor in self.tensors], ranges), key=itemgetter(0))
        tensors = [self.tensors[part].select(dim, [(start, stop) for _, start, stop in spans]) for part, spans in parts]
        return concat(tensors, dim) if tensors else _nothing(self, dim)

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        position = 0
        for tensor in self.tensors:
            length = tensor.shape[self.concat_dim]
            yield from tensor.read_steps(destination.narrow(self.concat_dim, position, length))
            position += length


class Transpose(LazyTensor):
    """`source` with the dims `first` and `second` swapped: (n, m) -> (m, n)."""

    def __init__(self, source: LazyTensor, first: int, second: int) -> None:
        self.source, self.first, self.second = source, first, second
        shape = list(source.shape)
        shape[first], shape[second] = shape[second], shape[first]
        self.shape = torch.Size(shape)
        self.dtype = source.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Transpose:
        """Select along the dim of the source that becomes `dim`."""
        inner = {self.first: self.second, self.second: self.first}.get(dim, dim)
        return Transpose(self.source.select(inner, ranges), self.first, self.second)

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        yield from self.source.read_steps(destination.transpose(self.first, self.second))


class Squeeze(LazyTensor):
    """`source` without `dim`, which has length 1: (n, 1, m) -> (n, m)."""

    def __init__(self, source: LazyTensor, dim: int) -> None:
        """Raises ValueError if `dim` has another length."""
        if source.shape[dim] != 1:
            raise ValueError(f"Squeeze of dim {dim}: got shape {tuple(source.shape)}, expected length 1 there")
        self.source, self.squeezed_dim = source, dim
        self.shape = torch.Size((*source.shape[:dim], *source.shape[dim + 1 :]))
        self.dtype = source.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Squeeze:
        inner = dim + (dim >= self.squeezed_dim)
        return Squeeze(self.source.select(inner, ranges), self.squeezed_dim)

    def read_steps(self, destination: torch.Tensor) -> Iterator[tuple[ReadStep, torch.Tensor]]:
        yield from self.source.read_steps(destination.unsqueeze(self.squeezed_dim))


def concat(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Concatenate `tensors` along `dim`; neighbouring slices of one stored tensor are merged.

    Raises ValueError as `Concat` does.
    """
    merged: list[LazyTensor] = []
    for tensor in tensors:
        last = merged[-1] if merged else None
        extended = last.extended(tensor, dim) if isinstance(last, Stored) else None
        if extended is None:
            merged.append(tensor)
        else:
            merged[-1] = extended
    return merged[0] if len(merged) == 1 else Concat(merged, dim)


def reshaped(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """Reshape `tensor` to `shape`. Reads it, unless it is a full stored tensor in the order of the file."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    if isinstance(tensor, Stored) and not tensor.looped:
        return Stored(tensor.source, offset=tensor.offset, shape=shape, dtype=tensor.dtype)
    return Resident(tensor.materialize().reshape(tuple(shape)))


def permute(tensor: LazyTensor, dim: int, order: Sequence[int]) -> LazyTensor:
    """Permute the indices of `dim`: index i of the result is index `order[i]` of `tensor`."""
    return tensor.select(dim, joined((index, index + 1) for index in order) or [(0, 0)])


def _check_same(kind: str, traits: Sequence[tuple[object, ...]]) -> None:
    if not traits:
        raise ValueError(f"{kind} of no tensors")
    if any(trait != traits[0] for trait in traits):
        raise ValueError(f"{kind} of tensors that differ: {', '.join(sorted(map(str, set(traits))))}")


def _nothing(tensor: LazyTensor, dim: int) -> Resident:
    """An empty slice of `tensor` along `dim`."""
    shape = list(tensor.shape)
    shape[dim] = 0
    return Resident(torch.empty(shape, dtype=tensor.dtype))
