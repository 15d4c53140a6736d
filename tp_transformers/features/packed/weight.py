"""Weights that stay quantised in memory, and the operators that multiply them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from ...anatomy import check_values
from ...errors import UnsupportedError
from ...marks import Mark
from ...slices.lazy import LazyTensor
from ...slices.stored import Stored
from ..quantized.bundle import Decoded
from .blocks4 import Blocks4, Blocks4Cuda
from .float8 import Float8Cpu, Float8Cuda
from .integers import Int4Cpu, Int4Cuda, Int8, Int8Gpu
from .tiled import Operator, StoredRows

DECODED = "decoded"
"""The product of a weight that no operator multiplies: a few rows at a time are decoded in each forward."""


class HeldWeight(Protocol):
    """A rank's shard of a weight in quantised form."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoded weight."""

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    @property
    def product(self) -> str:
        """Name of the operator that multiplies it, or `decoded`."""

    def decoded(self) -> torch.Tensor:
        """Decode to a contiguous tensor."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`torch.nn.functional.linear(x, weight)` of a matrix for x (tokens, columns); not recorded by autograd."""


@dataclass(frozen=True)
class PackedBlock:
    """Stored tensors that decode to a strided view of a packed weight."""

    decoded: Decoded
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    product: Operator | None = None
    """The values in the layout of an operator, of which `decoded` makes its stored tensors where they are needed."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.product.nbytes if self.product else sum(tensor.nbytes for tensor in self.decoded.stored.values())

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.size[-2]

    def has_rows(self, columns: int) -> bool:
        """True if it consists of complete rows of a matrix of `columns`; the stride of a dim of length 1 is any."""
        strides = zip(self.size[-2:], self.stride[-2:], (columns, 1), strict=True)
        return self.size[-1] == columns and all(size == 1 or stride == step for size, stride, step in strides)

    def fill(self, weight: torch.Tensor) -> None:
        """Decode into `weight`."""
        view = weight.as_strided(self.size, self.stride, self.offset)
        if self.product is None:
            self.decoded.fill(view)
        else:
            view.copy_(self.product.weight())

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, columns) -> (tokens, rows), with the operator, or with a few decoded rows at a time."""
        return (self.product or self._stored_rows).linear(x)

    @cached_property
    def _stored_rows(self) -> StoredRows:
        rows, columns = self.decoded.dims[-2:]
        return StoredRows(rows, columns, self.decoded)

    def at(self, index: int, numel: int) -> PackedBlock | None:
        """The block of the weight at `index` of dim 0, which has `numel` elements; None if they do not overlap."""
        first = self.offset // numel
        if len(self.size) == 2:
            return replace(self, offset=self.offset - first * numel) if first == index else None
        if not first <= index < first + self.size[0]:
            return None
        decoded = self.decoded.at(0, self.decoded.dims[0].indices[index - first])
        return replace(self, decoded=decoded, size=(1, *self.size[1:]), offset=self.offset - first * numel)

    def transposed(self, rows: int, columns: int) -> PackedBlock:
        """The block of the transposed matrix (columns, rows)."""

        def moved(place: int) -> int:
            row, column = divmod(place, columns)
            return column * rows + row

        return replace(self, stride=tuple(map(moved, self.stride)), offset=moved(self.offset))


@dataclass(frozen=True)
class PackedWeight:
    """The stored tensors of a rank's shard of `shape`; `dtype` and `device` are those of the decoded weight."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    blocks: Sequence[PackedBlock]
    _selected: dict[int, PackedWeight] = field(default_factory=dict, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors in memory."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def product(self) -> str:
        titles = {DECODED if block.product is None else block.product.title for block in self.blocks}
        return " and ".join(sorted(titles))

    def decoded(self) -> torch.Tensor:
        """Decode to a contiguous tensor."""
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for block in self.blocks:
            block.fill(weight)
        return weight

    def select(self, index: int) -> PackedWeight:
        """The weight at one index of dim 0, such as one of several experts."""
        index = range(self.shape[0])[index]
        if index not in self._selected:
            numel = math.prod(self.shape[1:])
            blocks = [block for each in self.blocks if (block := each.at(index, numel)) is not None]
            self._selected[index] = PackedWeight(self.shape[1:], self.dtype, self.device, blocks)
        return self._selected[index]

    @cached_property
    def transposed(self) -> PackedWeight:
        """The transposed matrix."""
        rows, columns = self.shape
        blocks = [block.transposed(rows, columns) for block in self.blocks]
        return PackedWeight(torch.Size((columns, rows)), self.dtype, self.device, blocks)

    @cached_property
    def row_blocks(self) -> Sequence[PackedBlock] | None:
        """The blocks in the order of their rows, if each consists of complete rows of the matrix; else None."""
        if not all(block.has_rows(self.shape[-1]) for block in self.blocks):
            return None
        return sorted(self.blocks, key=lambda block: block.offset)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`torch.nn.functional.linear(x, weight)` for x (tokens, columns); decodes a few rows at a time."""
        blocks = self.row_blocks
        if blocks is None or x.dtype != self.dtype or not x.shape[0]:
            return linear(x, self.decoded())
        return blocks[0].linear(x) if len(blocks) == 1 else torch.cat([block.linear(x) for block in blocks], -1)


def pack(
    shard: LazyTensor, dtype: torch.dtype, device: torch.device
) -> tuple[PackedWeight, list[tuple[Stored, torch.Tensor]]] | None:
    """Create a packed weight and the reads that fill it; None unless all of it is quantised."""
    full = torch.empty(shard.shape, dtype=dtype, device="meta")  # only for strides and offsets of views
    buffers: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def held(view: torch.Tensor) -> torch.Tensor:
        """A view of a meta tensor, in the memory on `device` that its storage stands for."""
        key = (storage := view.untyped_storage())._cdata
        if key not in buffers:
            buffers[key] = storage, torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
        return buffers[key][1].view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())

    blocks, reads = [], []
    for source, view in shard.read_steps(full):
        if isinstance(source, Decoded):
            if all(tensor.is_floating_point() and tensor.itemsize > 1 for tensor in source.stored.values()):
                return None  # rows of a GGUF in another order
            source = replace(source, stored={name: held(tensor) for name, tensor in source.stored.items()})
            blocks.append(PackedBlock(source, tuple(view.shape), tuple(view.stride()), int(view.storage_offset())))
        elif view.untyped_storage()._cdata == full.untyped_storage()._cdata:
            return None
        elif isinstance(source, Stored):
            reads.append((source, held(view)))
        else:
            source.fill(held(view))
    if not blocks or math.prod(shard.shape) == 0:
        return None
    return PackedWeight(shard.shape, dtype, device, blocks), reads


PACKED: Mark[dict[str, HeldWeight]] = Mark("tp_packed")
"""The packed weights of a module, by parameter name."""


def packed_weights(model: nn.Module) -> Mapping[str, HeldWeight]:
    """Return the packed weights of a model, by parameter name."""
    return {
        f"{prefix}.{name}".lstrip("."): weight
        for prefix, module in model.named_modules()
        for name, weight in (PACKED.find(module) or {}).items()
    }


def unpacked_only(subject: str, got: str) -> UnsupportedError:
    """Build the error for a use of packed weights that needs their values."""
    fix = "Load the model with tp_dequantize=True, or without quantization_config."
    return UnsupportedError(subject, got=got, expected="weights in floating point", fix=fix)


@contextmanager
def without_packed(model: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Exclude packed weights from a block that applies `move` to all parameters.

    Raises UnsupportedError if `move` would change their dtype or device.
    """
    for weight in packed_weights(model).values():
        moved = move(torch.empty(0, dtype=weight.dtype, device=weight.device))
        if moved.dtype != weight.dtype or moved.device != weight.device:
            check_values(model, "another dtype" if moved.dtype != weight.dtype else "another device")
    owners = [module for module in model.modules() if PACKED.find(module)]
    saved = [{name: module._parameters[name] for name in PACKED.of(module)} for module in owners]
    for module, placeholders in zip(owners, saved, strict=True):
        module._parameters.update(dict.fromkeys(placeholders))
    try:
        yield
    finally:
        for module, placeholders in zip(owners, saved, strict=True):
            module._parameters.update(placeholders)


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
"""Type of a device -> operators, the fastest first, by the format, dtype and device of a weight:

4 bits, groups of 32 to 256 columns     bfloat16 on a CPU or a GPU from NVIDIA      Int4
8 bits, one scale per row               bfloat16 on a CPU                           Int8
the same                                bfloat16 on a GPU                           Int8Gpu
nf4 and fp4 of bitsandbytes             bfloat16 on a CPU                           Blocks4
the same                                bfloat16 on a GPU from NVIDIA               Blocks4Cuda
8-bit floats                            bfloat16 on a CPU                           Float8Cpu
the same, activations quantised         bfloat16 on a GPU from NVIDIA               Float8Cuda
all others                                                                          none: decoded, a few rows at a time
"""


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
