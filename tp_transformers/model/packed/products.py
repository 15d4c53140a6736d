"""The operator that multiplies a packed weight, chosen by its format, dtype and device.

4 bits, groups of 32 to 256 columns     bfloat16 on a CPU or a GPU from NVIDIA      Int4
8 bits, one scale per row               bfloat16 on a CPU or a GPU                  Int8
all others                                                                          none: decoded, a few rows at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ...checkpoint.quantization.affine import Affine
from ...checkpoint.quantization.packed import PackedWeight, Piece
from .int4 import Int4
from .int4_cpu import Int4Cpu
from .int4_cuda import Int4Cuda
from .int8 import Int8
from .operator import Operator


def with_products(weight: PackedWeight) -> PackedWeight:
    """The weight in the layout of the operators that can multiply it; the stored tensors of the others are kept."""
    kinds = _OPERATORS.get(weight.device.type)
    if kinds is None or weight.dtype != torch.bfloat16:
        return weight
    return replace(weight, pieces=[_with_product(piece, kinds) for piece in weight.pieces])


_OPERATORS: Mapping[str, Mapping[int, type[Int4 | Int8]]] = {
    "cpu": {4: Int4Cpu, 8: Int8},
    "cuda": {4: Int4Cuda, 8: Int8},
}
"""Type of a device -> bits -> operator."""


def _with_product(piece: Piece, kinds: Mapping[int, type[Int4 | Int8]]) -> Piece:
    affine = piece.decoded.decode
    if not isinstance(affine, Affine) or len(piece.size) != 2 or piece.stride[-1] != 1:
        return piece
    if not affine.has_complete_words([dim.length for dim in piece.decoded.dims]):
        return piece
    kind = kinds.get(affine.bits)
    product = None if kind is None else kind.of(piece.decoded, affine)
    if product is None:
        return piece
    return replace(piece, decoded=replace(piece.decoded, parts=_Parts(product, affine)), product=product)


class _Parts(Mapping[str, torch.Tensor]):
    """The stored tensors of a matrix in an operator's layout; its integers are converted back when they are read."""

    def __init__(self, product: Operator, affine: Affine) -> None:
        self._product, self._affine = product, affine

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != self._affine.part:
            return self._product.kept[name]
        integers = self._product.integers()
        return integers if self._affine.stored is None else self._affine.stored(integers)

    def __iter__(self) -> Iterator[str]:
        return iter((self._affine.part, *self._product.kept))

    def __len__(self) -> int:
        return 1 + len(self._product.kept)
