"""A matrix of integers in the layout of an operator that multiplies them."""

from __future__ import annotations

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
TILE = 1 << 20
"""Elements decoded at a time."""


@dataclass(frozen=True, eq=False)
class Operator(ABC):
    """`x @ w.T` for a matrix (rows, columns): packed for a few tokens, else with a few decoded rows at a time."""

    title: ClassVar[str]
    """Name in the report of a load."""
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

    @abstractmethod
    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode a few rows at a time: (first row, values (width, rows))."""

    @abstractmethod
    def integers(self) -> torch.Tensor:
        """The integers (rows, columns) of complete groups, as they were stored."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        values = (*(getattr(self, field.name) for field in fields(self)), *self.kept.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) -> (tokens, rows)."""
        if self._spreads:
            x = self.columns.spread(x, self.width)
        x = x.contiguous()
        if x.shape[0] <= FEW:
            y = self.multiply(x)
        else:
            y, x = x.new_empty(len(x), self.height), x.to(product_dtype(x))
            for low, tile in self.tiles(x.dtype):
                y[:, low : low + tile.shape[1]] = x @ tile
        return self.rows.take(y, 1) if self._takes else y

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
        values = torch.cat([tile for _, tile in self.tiles(torch.bfloat16)], 1)
        return self.rows.take(self.columns.take(values, 0), 1).t()
