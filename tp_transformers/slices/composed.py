"""Stacks, concatenations and transposes of lazy tensors: moved data, no arithmetic.

    Stack(A, B)        [A, B] along a new dim         MergeModulelist
    Concat(A, B)       AB along a dim there is        Concatenate
    Transpose(A)       A with two dims swapped
    Squeeze(A)         A without a dim of length 1

Cuts need no class: a chunk is a selection of one range (`select`), a permutation along a dim is a selection of many
(`permute`). A new kind is one subclass: it says how a selection of itself becomes selections of its sources, and which
view of a destination each source fills, so that slices of the whole are read from the files straight into place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from .layout import Range, joined
from .lazy import LazyTensor, Leaf, Resident
from .stored import Stored


class Expression(LazyTensor):
    """A lazy tensor without values of its own: only the leaves among its sources are read."""

    @abstractmethod
    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """See `LazyTensor.pieces`."""

    def materialize(self) -> torch.Tensor:
        """Put every leaf into its place."""
        result = torch.empty(self.shape, dtype=self.dtype)
        for leaf, view in self.pieces(result):
            leaf.fill(view)
        return result


class Stack(Expression):
    """`parts` of one shape, side by side along a new `dim`: n of (..., m) -> (..., n, ..., m)."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        """Raises ValueError where there are no parts, or their shapes or dtypes differ."""
        _check_same("Stack", [(part.shape, part.dtype) for part in parts])
        self.parts, self.stack_dim = parts, dim
        shape = parts[0].shape
        self.shape = torch.Size((*shape[:dim], len(parts), *shape[dim:]))
        self.dtype = parts[0].dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """Some of the parts, or the same selection of each."""
        if dim == self.stack_dim:
            parts = [part for start, stop in ranges for part in self.parts[start:stop]]
            return Stack(parts, dim) if parts else _nothing(self, dim)
        inner = dim - (dim > self.stack_dim)
        return Stack([part.select(inner, ranges) for part in self.parts], self.stack_dim)

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        """Every part fills one index of the new dim."""
        for index, part in enumerate(self.parts):
            yield from part.pieces(destination.select(self.stack_dim, index))


class Concat(Expression):
    """`parts` one after the other along `dim`; their shapes differ in that dim alone."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        """Raises ValueError where there are no parts, or they differ in dtype or in another dim's length."""
        _check_same("Concat", [(part.shape[:dim], part.shape[dim + 1 :], part.dtype) for part in parts])
        self.parts, self.concat_dim = parts, dim
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        self.shape = torch.Size(shape)
        self.dtype = parts[0].dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> LazyTensor:
        """The same selection of each part; along the concatenated dim, the indices of each part in the ranges."""
        if dim != self.concat_dim:
            return Concat([part.select(dim, ranges) for part in self.parts], self.concat_dim)
        held: list[tuple[LazyTensor, list[Range]]] = []
        for start, stop in ranges:
            position = 0
            for part in self.parts:
                length = part.shape[dim]
                low, high = max(start - position, 0), min(stop - position, length)
                if low < high:
                    if not held or held[-1][0] is not part:
                        held.append((part, []))
                    held[-1][1].append((low, high))
                position += length
        parts = [part.select(dim, selected) for part, selected in held]
        return concat(parts, dim) if parts else _nothing(self, dim)

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        position = 0
        for part in self.parts:
            length = part.shape[self.concat_dim]
            yield from part.pieces(destination.narrow(self.concat_dim, position, length))
            position += length


class Transpose(Expression):
    """`source` with the dims `first` and `second` swapped: (n, m) -> (m, n)."""

    def __init__(self, source: LazyTensor, first: int, second: int) -> None:
        self.source, self.first, self.second = source, first, second
        shape = list(source.shape)
        shape[first], shape[second] = shape[second], shape[first]
        self.shape = torch.Size(shape)
        self.dtype = source.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Transpose:
        """Select along the source's dim that is seen as `dim`."""
        inner = {self.first: self.second, self.second: self.first}.get(dim, dim)
        return Transpose(self.source.select(inner, ranges), self.first, self.second)

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        yield from self.source.pieces(destination.transpose(self.first, self.second))


class Squeeze(Expression):
    """`source` without `dim`, which has length 1: (n, 1, m) -> (n, m)."""

    def __init__(self, source: LazyTensor, dim: int) -> None:
        """Raises ValueError where `dim` has another length."""
        if source.shape[dim] != 1:
            raise ValueError(f"Squeeze of dim {dim}: got shape {tuple(source.shape)}, expected length 1 there")
        self.source, self.squeezed_dim = source, dim
        self.shape = torch.Size((*source.shape[:dim], *source.shape[dim + 1 :]))
        self.dtype = source.dtype

    def select(self, dim: int, ranges: Sequence[Range]) -> Squeeze:
        inner = dim + (dim >= self.squeezed_dim)
        return Squeeze(self.source.select(inner, ranges), self.squeezed_dim)

    def pieces(self, destination: torch.Tensor) -> Iterator[tuple[Leaf, torch.Tensor]]:
        yield from self.source.pieces(destination.unsqueeze(self.squeezed_dim))


def concat(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """`parts` one after the other along `dim`; neighbours that are selections of one stored tensor become one.

    Raises ValueError as `Concat` does.
    """
    merged: list[LazyTensor] = []
    for part in parts:
        last = merged[-1] if merged else None
        extended = last.extended(part, dim) if isinstance(last, Stored) else None
        if extended is None:
            merged.append(part)
        else:
            merged[-1] = extended
    return merged[0] if len(merged) == 1 else Concat(merged, dim)


def merge_last(tensor: LazyTensor) -> LazyTensor:
    """`tensor` with its last two dims as one: (..., n, m) -> (..., n * m). One that is not stored whole is read."""
    *outer, rows, columns = tensor.shape
    return reshaped(tensor, (*outer, rows * columns))


def reshaped(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """`tensor` in another `shape` of as many elements. One that is not stored whole is read."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    if isinstance(tensor, Stored) and tensor.stored_shape == tuple(tensor.shape):
        return Stored(tensor.source, offset=tensor.offset, shape=shape, dtype=tensor.dtype)
    return Resident(tensor.materialize().reshape(tuple(shape)))


def permute(tensor: LazyTensor, dim: int, order: Sequence[int]) -> LazyTensor:
    """`tensor` with the indices of `dim` in another `order`: index i of the result is index `order[i]` of it."""
    return tensor.select(dim, joined((index, index + 1) for index in order) or [(0, 0)])


def _check_same(kind: str, traits: Sequence[tuple[object, ...]]) -> None:
    if not traits:
        raise ValueError(f"{kind} of no parts")
    if any(trait != traits[0] for trait in traits):
        raise ValueError(f"{kind} of parts that differ: {', '.join(sorted(map(str, set(traits))))}")


def _nothing(tensor: LazyTensor, dim: int) -> Resident:
    """An empty selection of `tensor` along `dim`: no part is left to tell its shape."""
    shape = list(tensor.shape)
    shape[dim] = 0
    return Resident(torch.empty(shape, dtype=tensor.dtype))
