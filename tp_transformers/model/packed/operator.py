"""A matrix of integers in the layout of an operator that multiplies them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch

from ...checkpoint.quantization.packed import product_dtype
from ...slices.bundle import Aligned

FEW = 64
"""Tokens up to which the operators are faster than decoding and torch's matrix product."""
TILE = 1 << 23
"""Bytes of rows that are decoded, and multiplied, at a time."""

_OF_THREAD = threading.local()


def _scratch(numel: int, x: torch.Tensor) -> torch.Tensor:
    """A buffer like x. On a CPU the thread keeps it: new memory would have to be cleared in every call."""
    if x.device.type != "cpu":
        return x.new_empty(numel)
    nbytes, buffer = numel * x.itemsize, getattr(_OF_THREAD, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        with torch.inference_mode(False):
            buffer = _OF_THREAD.buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer[:nbytes].view(x.dtype)


@dataclass(frozen=True, eq=False)
class Operator(ABC):
    """`x @ w.T` for a matrix (rows, columns): packed for a few tokens, else with a few decoded rows at a time."""

    title: ClassVar[str]
    """Name in the report of a load."""
    is_row_major: ClassVar[bool]
    """True if `decode` makes rows whose columns are adjacent in memory."""
    rows: Aligned
    columns: Aligned
    kept: Mapping[str, torch.Tensor]
    """The stored tensors without the integers."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of the layout, padding included."""

    @property
    @abstractmethod
    def height(self) -> int:
        """Rows of the layout, padding included."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> (tokens, height), by the operator."""

    @property
    def unit(self) -> int:
        """Rows of which `decode` takes multiples."""
        return 1

    @abstractmethod
    def decode(self, first: int, values: torch.Tensor) -> None:
        """Decode rows of the layout from `first` on, multiples of `unit`, into `values` (width, rows)."""

    @abstractmethod
    def integers(self) -> torch.Tensor:
        """The integers (rows, columns) of complete groups, as they were stored."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in (*self._tensors, *self.kept.values()))

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """The tensors of the layout."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if isinstance(value, torch.Tensor)]

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) -> (tokens, rows)."""
        if self._spreads:
            x = self.columns.spread(x, self.width)
        x = x.contiguous()
        y = self.multiply(x) if len(x) <= FEW else self._multiply_decoded(x.to(product_dtype(x)), x.dtype)
        return self.rows.take(y, 1) if self._takes else y

    def _multiply_decoded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(tokens, width) -> (tokens, height) in `dtype`, with a few decoded rows at a time."""

        def multiply(rows: range) -> torch.Tensor:
            tile = self._matrix(_scratch(self.width * len(rows), x))
            self.decode(rows.start, tile)
            return (x @ tile).to(dtype)

        ranges = list(self._ranges(x.itemsize))
        if len(ranges) == 1:
            return multiply(ranges[0])
        y = x.new_empty(len(x), self.height, dtype=dtype)
        for rows in ranges:
            y[:, rows.start : rows.stop] = multiply(rows)
        return y

    def _ranges(self, itemsize: int) -> Iterator[range]:
        """Ranges of rows of about `TILE` bytes each, if an element has `itemsize`."""
        step = max(TILE // itemsize // self.width // self.unit, 1) * self.unit
        return (range(low, min(low + step, self.height)) for low in range(0, self.height, step))

    def _matrix(self, buffer: torch.Tensor) -> torch.Tensor:
        """A flat buffer as a matrix (width, rows), in the order in which `decode` is fastest."""
        return buffer.view(-1, self.width).t() if self.is_row_major else buffer.view(self.width, -1)

    @cached_property
    def _spreads(self) -> bool:
        """True if the layout has columns that the weight does not have."""
        return not self.columns.is_all_of(self.width)

    @cached_property
    def _takes(self) -> bool:
        """True if the layout has rows that the weight does not have."""
        return not self.rows.is_all_of(self.height)

    def weight(self) -> torch.Tensor:
        """Decode to (rows, columns)."""
        buffer = torch.empty(self.width * self.height, dtype=torch.bfloat16, device=self._tensors[0].device)
        values = self._matrix(buffer)
        for rows in self._ranges(buffer.itemsize):
            self.decode(rows.start, values[:, rows.start : rows.stop])
        return self.rows.take(self.columns.take(values, 0), 1).t()
