"""A matrix of integers in the layout of an operator that multiplies them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from ...checkpoint.quantization.tiled import Tiled

FEW = 64
"""Tokens up to which the operators are faster than decoding and torch's matrix product."""


@dataclass(frozen=True, eq=False)
class Operator(Tiled):
    """`x @ w.T` for a matrix (rows, columns): packed for a few tokens, else with a few decoded rows at a time."""

    title: ClassVar[str]
    """Name in the report of a load."""
    kept: Mapping[str, torch.Tensor]
    """The stored tensors without the integers."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> (tokens, height), by the operator."""

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

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `Tiled.product`."""
        return self.multiply(x) if len(x) <= FEW else super().product(x)

    def weight(self) -> torch.Tensor:
        """Decode to (rows, columns)."""
        values = torch.empty(self.height, self.width, dtype=torch.bfloat16, device=self._tensors[0].device)
        self.fill(0, values)
        return self.rows.take(self.columns.take(values, 1), 0)
