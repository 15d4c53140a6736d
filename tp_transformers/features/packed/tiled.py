"""Products with a matrix that is decoded a few rows at a time, or that an operator multiplies in its own layout."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, cast

import torch

from ...torch_api import has_bfloat16
from ..quantized.affine import Affine
from ..quantized.bundle import Aligned, Decoded, at_a_time

_TILE = 1 << 24
"""Bytes of rows that are multiplied at a time on a CPU."""
_FEW = 8
"""Tokens whose product does not make up for a conversion of decoded values to bfloat16."""

DECODED = "decoded"
"""Title of a matrix that no operator multiplies: a few rows at a time are decoded in each forward."""

_OF_THREAD = threading.local()


def scratch(numel: int, x: torch.Tensor) -> torch.Tensor:
    """A buffer like x. On a CPU the thread keeps it: new memory would have to be cleared in every call."""
    if x.device.type != "cpu":
        return x.new_empty(numel)
    nbytes, buffer = numel * x.itemsize, getattr(_OF_THREAD, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        with torch.inference_mode(False):
            buffer = _OF_THREAD.buffer = torch.empty(nbytes, dtype=torch.uint8)
    return buffer[:nbytes].view(x.dtype)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which a product of x (tokens, columns) with decoded values is fastest.

    On a CPU products in bfloat16 need instructions of their own, and several tokens.
    """
    is_slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and (len(x) <= _FEW or not has_bfloat16())
    return torch.float32 if is_slow else x.dtype


@dataclass(frozen=True, eq=False)
class Tiled(ABC):
    """`x @ w.T` for a matrix (rows, columns) in a layout (width, height), with a few decoded rows at a time."""

    title: ClassVar[str] = DECODED
    """Name in the report of a load."""

    decoded: Decoded
    """The stored tensors, without the one that the layout replaces; to multiply, all leading dims have length 1."""

    @property
    def replaced(self) -> str:
        """Name of the stored tensor that the layout replaces; "" for none."""
        return ""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        kept = (tensor for name, tensor in self.decoded.stored.items() if name != self.replaced)
        layout = (getattr(self, field.name) for field in fields(self))
        return sum(tensor.nbytes for tensor in (*kept, *layout) if isinstance(tensor, torch.Tensor))

    def stored(self, name: str) -> torch.Tensor:
        """A stored tensor; the one that the layout replaces is converted back by this call."""
        return self.decoded.stored[name]

    @abstractmethod
    def write(self, destination: torch.Tensor) -> None:
        """Decode to a `destination` of any strides."""

    @property
    def rows(self) -> Aligned:
        return self.decoded.dims[-2]

    @property
    def columns(self) -> Aligned:
        return self.decoded.dims[-1]

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of the layout, with those of padding."""

    @property
    @abstractmethod
    def height(self) -> int:
        """Rows of the layout, likewise."""

    @property
    def unit(self) -> int:
        """Rows of which `decode` takes multiples."""
        return 1

    @abstractmethod
    def decode(self, first: int, values: torch.Tensor) -> None:
        """Decode rows of the layout from `first` on, multiples of `unit`, into `values` (rows, width)."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) -> (tokens, rows)."""
        if self._spreads:
            x = self.columns.spread(x, self.width)
        y = self.product(x.contiguous())
        return self.rows.take(y, 1) if self._takes else y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> (tokens, height)."""
        dtype, x = x.dtype, x.to(product_dtype(x))
        y = x.new_empty(len(x), self.height)
        for first, tile in self.tiles(x):
            torch.mm(x, tile.t(), out=y[:, first : first + len(tile)])
        return y.to(dtype)

    def tiles(self, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode a few rows at a time, in the dtype of x: (index of the first row, values (rows, width)).

        The next tile may overwrite the values.
        """
        for rows in self._ranges(0, self.height, max(_TILE // x.itemsize, at_a_time(x.device))):
            tile = scratch(self.width * len(rows), x).view(-1, self.width)
            self.fill(rows.start, tile)
            yield rows.start, tile

    def fill(self, first: int, values: torch.Tensor) -> None:
        """Decode as `decode`, with memory for a few rows."""
        for rows in self._ranges(first, first + len(values), at_a_time(values.device)):
            self.decode(rows.start, values[rows.start - first : rows.stop - first])

    def _ranges(self, first: int, last: int, numel: int) -> Iterator[range]:
        """Ranges of rows in [first, last), of about `numel` elements each."""
        step = max(numel // self.width // self.unit, 1) * self.unit
        return (range(low, min(low + step, last)) for low in range(first, last, step))

    @cached_property
    def _spreads(self) -> bool:
        """True if the layout has columns that the weight does not have."""
        return not self.columns.is_all_of(self.width)

    @cached_property
    def _takes(self) -> bool:
        """True if the layout has rows that the weight does not have."""
        return not self.rows.is_all_of(self.height)


@dataclass(frozen=True, eq=False)
class StoredRows(Tiled):
    """A matrix that its format decodes."""

    def write(self, destination: torch.Tensor) -> None:
        self.decoded.fill(destination)

    @property
    def width(self) -> int:
        return self.columns.length

    @property
    def height(self) -> int:
        return self.rows.length

    @property
    def unit(self) -> int:
        return self.rows.unit

    def decode(self, first: int, values: torch.Tensor) -> None:
        values.copy_(self.decoded.block(first, first + len(values)).flatten(0, -2))

    def tiles(self, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """See `Tiled.tiles`; values on a GPU, and in fp32, the dtype of most decoders, are not copied."""
        if x.dtype != torch.float32 and x.device.type == "cpu":
            yield from super().tiles(x)
            return
        for rows in self._ranges(0, self.height, at_a_time(x.device)):
            yield rows.start, self.decoded.block(rows.start, rows.stop).flatten(0, -2).to(x.dtype)


FEW = 64
"""Tokens up to which the operators are faster than decoding and torch's matrix product."""


@dataclass(frozen=True, eq=False)
class Operator(Tiled):
    """`x @ w.T` for a matrix (rows, columns): packed for a few tokens, else with a few decoded rows at a time."""

    few: ClassVar[int] = FEW
    """Tokens up to which `multiply` is called."""
    per_item: ClassVar[int] = 1
    """Columns of one of the `values`."""

    values: torch.Tensor
    """(height, width / `per_item`), in place of a stored tensor."""

    @property
    def width(self) -> int:
        return self.values.shape[1] * self.per_item

    @property
    def height(self) -> int:
        return len(self.values)

    @classmethod
    @abstractmethod
    def of(cls, decoded: Decoded) -> Operator | None:
        """Convert a matrix; None if the operator cannot multiply it."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, width) -> (tokens, height), by the operator."""

    @property
    def replaced(self) -> str:
        return "values"

    @abstractmethod
    def restored(self) -> torch.Tensor:
        """Convert the layout back to the stored tensor that it replaces."""

    def stored(self, name: str) -> torch.Tensor:
        return self.restored() if name == self.replaced else super().stored(name)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x) if len(x) <= self.few else super().product(x)

    def write(self, destination: torch.Tensor) -> None:
        values = torch.empty(self.height, self.width, dtype=torch.bfloat16, device=self.values.device)
        self.fill(0, values)
        destination.copy_(self.rows.take(self.columns.take(values, 1), 0))


@dataclass(frozen=True, eq=False)
class IntegerOperator(Operator):
    """A matrix of integers with a scale and a zero point per group."""

    @property
    def affine(self) -> Affine:
        return cast("Affine", self.decoded.decode)

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
    def replaced(self) -> str:
        return self.affine.integers_key

    def restored(self) -> torch.Tensor:
        integers = self.integers()
        return integers if self.affine.stored is None else self.affine.stored(integers)


def without(decoded: Decoded, name: str) -> Decoded:
    """The matrix without one of the stored tensors."""
    return replace(decoded, stored={key: tensor for key, tensor in decoded.stored.items() if key != name})
