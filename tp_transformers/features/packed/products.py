"""The operator that multiplies a packed weight, chosen by its format, dtype and device.

4 bits, groups of 32 to 256 columns     bfloat16 on a CPU or a GPU from NVIDIA      Int4
8 bits, one scale per row               bfloat16 on a CPU                           Int8
the same                                bfloat16 on a GPU                           Int8Gpu
nf4 and fp4 of bitsandbytes             bfloat16 on a CPU                           Blocks4
the same                                bfloat16 on a GPU from NVIDIA               Blocks4Cuda
8-bit floats                            bfloat16 on a CPU                           Float8Cpu
the same, activations quantised         bfloat16 on a GPU from NVIDIA               Float8Cuda
all others                                                                          none: decoded, a few rows at a time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from .blocks4 import Blocks4, Blocks4Cuda
from .float8 import Float8Cpu, Float8Cuda
from .int4 import Int4Cpu, Int4Cuda
from .int8 import Int8, Int8Gpu
from .operator import Operator
from .weight import PackedBlock, PackedWeight


def with_products(weight: PackedWeight) -> PackedWeight:
    """The weight in the layout of the operators that can multiply it; the stored tensors of the others are kept.

    On the meta device, the layouts are those of a CPU.
    """
    kinds = _OPERATORS.get("cpu" if weight.device.type == "meta" else weight.device.type)
    if kinds is None or weight.dtype != torch.bfloat16:
        return weight
    return replace(weight, blocks=[_with_product(block, kinds) for block in weight.blocks])


_OPERATORS: Mapping[str, Sequence[type[Operator]]] = {
    "cpu": (Int4Cpu, Int8, Blocks4, Float8Cpu),
    "cuda": (Int4Cuda, Int8Gpu, Blocks4Cuda, Float8Cuda),
}
"""Type of a device -> operators, the fastest first."""


def _with_product(block: PackedBlock, kinds: Sequence[type[Operator]]) -> PackedBlock:
    if len(block.size) != 2 or block.stride[-1] != 1:
        return block
    product = next(filter(None, (kind.of(block.decoded) for kind in kinds)), None)
    if product is None:
        return block
    return replace(block, decoded=replace(block.decoded, stored=_StoredValues(product)), product=product)


class _StoredValues(Mapping[str, torch.Tensor]):
    """The stored tensors of a matrix in an operator's layout; its integers are converted back when they are read."""

    def __init__(self, product: Operator) -> None:
        self._product = product

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._product.stored() if name == self._product.integers_key else self._product.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter((self._product.integers_key, *self._product.kept))

    def __len__(self) -> int:
        return 1 + len(self._product.kept)
