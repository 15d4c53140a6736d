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
"""Bytes of decoded rows that are multiplied at a time."""
CHUNK = 1 << 19
"""Elements decoded at a time: what they are decoded by stays in the processor's cache."""

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
            return (x @ self._decode_into(_scratch(self.width * len(rows), x), rows)).to(dtype)

        ranges = list(self._ranges(0, self.height, TILE // x.itemsize))
        if len(ranges) == 1:
            return multiply(ranges[0])
        y = x.new_empty(len(x), self.height, dtype=dtype)
        for rows in ranges:
            y[:, rows.start : rows.stop] = multiply(rows)
        return y

    def _ranges(self, first: int, last: int, numel: int) -> Iterator[range]:
        """Ranges of rows of about `numel` elements each."""
        step = max(numel // self.width // self.unit, 1) * self.unit
        return (range(low, min(low + step, last)) for low in range(first, last, step))

    def _decode_into(self, values: torch.Tensor, rows: range) -> torch.Tensor:
        """Decode rows of the layout into a flat buffer, a few at a time; returns them as (width, rows)."""
        values = values[: self.width * len(rows)]
        values = values.view(-1, self.width).t() if self.is_row_major else values.view(self.width, -1)
        for chunk in self._ranges(rows.start, rows.stop, CHUNK):
            self.decode(chunk.start, values[:, chunk.start - rows.start : chunk.stop - rows.start])
        return values

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
        values = torch.empty(self.width * self.height, dtype=torch.bfloat16, device=self._tensors[0].device)
        values = self._decode_into(values, range(self.height))
        return self.rows.take(self.columns.take(values, 0), 1).t()
