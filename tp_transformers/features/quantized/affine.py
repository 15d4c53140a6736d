"""Integers with a scale and a zero point per group of columns: `(integer - zero) * scale`.

GPTQ, AWQ, the integers of compressed-tensors and int8 of bitsandbytes are such formats. Their decoders expose the
integers, so that an operator that multiplies integers can hold them in its own layout; see `features/packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .bundle import Decode, StoredValues
from .format import multiply_blocks, subtract_blocks


@dataclass(frozen=True)
class Affine:
    """A `Decode` of integers with scales and zero points."""

    decode: Decode
    bits: int
    group: int | None
    """Columns that share a scale, from column 0 on; None for one scale per row."""
    integers_key: str
    """Name of the stored tensor that holds the integers."""
    integers: Callable[[StoredValues, Sequence[int]], torch.Tensor]
    """The integers, (rows, columns): int8 or uint8."""
    scales: Callable[[StoredValues, Sequence[int]], tuple[torch.Tensor, torch.Tensor | int]]
    """Scales and zero points, (rows, groups); zero points are in the units of `integers`. See `adds`."""
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The inverse of `integers`, for complete words; None if the integers are the stored tensor itself."""
    packed_dim: int = 1
    """The dim along which words are packed."""
    adds: bool = False
    """True if `scales` returns the value of integer 0 in place of its zero point: `integer * scale + value`."""

    def with_rows(self, order: Callable[[torch.Tensor], torch.Tensor]) -> Affine:
        """The decoder of the weight with its rows in another `order`."""

        def scales(stored: StoredValues, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | int]:
            scale, zero = self.scales(stored, shape)
            return order(scale), order(zero) if isinstance(zero, torch.Tensor) else zero

        return replace(
            self,
            decode=lambda stored, shape: order(self.decode(stored, shape)),
            integers=lambda stored, shape: order(self.integers(stored, shape)),
            scales=scales,
        )

    def has_complete_words(self, shape: Sequence[int]) -> bool:
        """True if `stored` can make all words of a slice of `shape`; the last word of a tensor may be incomplete."""
        return self.stored is None or shape[self.packed_dim] % (32 // self.bits) == 0

    def __call__(self, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
        return self.decode(stored, shape)


def by_groups(integers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int | None) -> torch.Tensor:
    """Decode unsigned integers (rows, columns) in float32, rounded to the dtype of the scales.

    These are the bits of the products in that dtype, which the libraries of GPTQ and AWQ compute. `group`: columns that
    share a scale; None for all.
    """
    differences = subtract_blocks(integers.to(torch.float32), zeros, (group,))
    return multiply_blocks(differences, scales, (group,)).to(scales.dtype)


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 values of 4 or 8 bits (n, m) into int32 (n, m * bits / 32); the inverse of `format.unpack`."""
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)
