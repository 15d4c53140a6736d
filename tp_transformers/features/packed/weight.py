"""Weights that stay quantised in memory, and the operators that multiply them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from .tiled import DECODED, Operator, StoredRows, Tiled


@dataclass(frozen=True)
class HeldWeight(ABC):
    """A rank's shard of a weight in quantised form; `dtype` and `device` are those of the decoded weight."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory."""

    @property
    def product(self) -> str:
        """Name of the operator that multiplies it, or `decoded`."""
        return DECODED

    @abstractmethod
    def decoded(self) -> torch.Tensor:
        """Decode to a contiguous tensor."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`torch.nn.functional.linear(x, weight)` of a matrix for x (tokens, columns); not recorded by autograd."""
        return linear(x, self.decoded())


@dataclass(frozen=True)
class PackedBlock:
    """A matrix, or several of them stacked, that decodes to a strided view of a packed weight."""

    matrix: Tiled
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fill(self, weight: torch.Tensor) -> None:
        """Decode into `weight`."""
        self.matrix.write(weight.as_strided(self.size, self.stride, self.offset))

    def at(self, index: int, numel: int) -> PackedBlock | None:
        """The block of the weight at `index` of dim 0, which has `numel` elements; None if they do not overlap."""
        first = self.offset // numel
        if len(self.size) == 2:
            return replace(self, offset=self.offset - first * numel) if first == index else None
        if not first <= index < first + self.size[0]:
            return None
        stacked = self.matrix.decoded
        matrix = StoredRows(stacked.at(0, stacked.dims[0].indices[index - first]))
        return replace(self, matrix=matrix, size=(1, *self.size[1:]), offset=self.offset - first * numel)

    def transposed(self, rows: int, columns: int) -> PackedBlock:
        """The block of the transposed matrix (columns, rows)."""

        def moved(place: int) -> int:
            row, column = divmod(place, columns)
            return column * rows + row

        return replace(self, stride=tuple(map(moved, self.stride)), offset=moved(self.offset))


@dataclass(frozen=True)
class PackedWeight(HeldWeight):
    """A shard whose stored tensors are in memory."""

    blocks: Sequence[PackedBlock]
    _selected: dict[int, PackedWeight] = field(default_factory=dict, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(block.matrix.nbytes for block in self.blocks)

    @property
    def product(self) -> str:
        return " and ".join(sorted({block.matrix.title for block in self.blocks}))

    def decoded(self) -> torch.Tensor:
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
        strides = (self.shape[-1], 1)
        for block in self.blocks:
            steps = zip(block.size[-2:], block.stride[-2:], strides, strict=True)
            if block.size[-1] != strides[0] or any(size > 1 and stride != step for size, stride, step in steps):
                return None  # the stride of a dim of length 1 is any
        return sorted(self.blocks, key=lambda block: block.offset)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeldWeight.linear`; decodes a few rows at a time."""
        blocks = self.row_blocks
        if blocks is None or x.dtype != self.dtype or not x.shape[0]:
            return super().linear(x)
        products = [block.matrix.linear(x) for block in blocks]
        return products[0] if len(products) == 1 else torch.cat(products, -1)


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
            place = tuple(view.shape), tuple(view.stride()), int(view.storage_offset())
            blocks.append(PackedBlock(StoredRows(source), *place))
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
    placeholders = [
        (module, {name: module._parameters[name] for name in PACKED.of(module)})
        for module in model.modules()
        if PACKED.find(module)
    ]
    for module, named in placeholders:
        module._parameters.update(dict.fromkeys(named))
    try:
        yield
    finally:
        for module, named in placeholders:
            module._parameters.update(named)


def with_products(weight: PackedWeight) -> PackedWeight:
    """The weight in the layout of the operators that can multiply it; the stored tensors of the others are kept.

    On the meta device, the layouts are those of a CPU.
    """
    kinds = _OPERATORS.get("cpu" if weight.device.type == "meta" else weight.device.type)
    if kinds is None or weight.dtype != torch.bfloat16:
        return weight
    blocks = list(weight.blocks)
    for index, block in enumerate(blocks):
        if len(block.size) == 2 and block.stride[-1] == 1:
            operator = next(filter(None, (kind.of(block.matrix.decoded) for kind in kinds)), None)
            blocks[index] = block if operator is None else replace(block, matrix=operator)
    return replace(weight, blocks=blocks)


_OPERATORS: Mapping[str, Sequence[type[Operator]]] = {
    "cpu": (Int4Cpu, Int8, Blocks4, Float8Cpu),
    "cuda": (Int4Cuda, Int8Gpu, Blocks4Cuda, Float8Cuda),
}
"""Type of a device -> operators, the fastest first; the README has their weights."""
