"""A matrix in the layout of an operator that multiplies it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from ..quantized.affine import Affine
from ..quantized.bundle import Decoded
from .tiled import Tiled

FEW = 64
"""Tokens up to which the operators are faster than decoding and torch's matrix product."""


@dataclass(frozen=True, eq=False)
class Operator(Tiled):
    """`x @ w.T` for a matrix (rows, columns): packed for a few tokens, else with a few decoded rows at a time."""

    title: ClassVar[str]
    """Name in the report of a load."""
    few: ClassVar[int] = FEW
    """Tokens up to which `multiply` is called."""
    kept: Mapping[str, torch.Tensor]
    """The stored tensors without the one that `stored` makes."""

    @classmethod
    @abstractmethod
    def of(cls, decoded: Decoded) -> Operator | None:
        """Convert a matrix; None if the operator cannot multiply it."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> (tokens, height), by the operator."""

    @property
    @abstractmethod
    def integers_key(self) -> str:
        """Name of the stored tensor that has the integers."""

    @abstractmethod
    def stored(self) -> torch.Tensor:
        """Convert the integers back to the stored tensor."""

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
        return self.multiply(x) if len(x) <= self.few else super().product(x)

    def weight(self) -> torch.Tensor:
        """Decode to (rows, columns)."""
        values = torch.empty(self.height, self.width, dtype=torch.bfloat16, device=self._tensors[0].device)
        self.fill(0, values)
        return self.rows.take(self.columns.take(values, 1), 0)


@dataclass(frozen=True, eq=False)
class IntegerOperator(Operator):
    """A matrix of integers with a scale and a zero point per group."""

    affine: Affine

    @classmethod
    def of(cls, decoded: Decoded) -> IntegerOperator | None:
        affine = decoded.decode
        if not isinstance(affine, Affine) or not affine.has_complete_words([dim.length for dim in decoded.dims]):
            return None
        return cls.of_integers(decoded, affine)

    @classmethod
    @abstractmethod
    def of_integers(cls, decoded: Decoded, affine: Affine) -> IntegerOperator | None:
        """Convert a matrix of complete words; None if the operator cannot multiply it."""

    @abstractmethod
    def integers(self) -> torch.Tensor:
        """The integers (rows, columns) of complete groups, as they were stored."""

    @property
    def integers_key(self) -> str:
        return self.affine.integers_key

    def stored(self) -> torch.Tensor:
        integers = self.integers()
        return integers if self.affine.stored is None else self.affine.stored(integers)


def without(stored: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The stored tensors without one."""
    return {key: tensor for key, tensor in stored.items() if key != name}
