"""GGUF (llama.cpp): blocks of 32 or 256 columns, each with its scales.

[header.py](header.py) reads the file, [names.py](names.py) names its tensors. The package `gguf` decodes
blocks, as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...slices.lazy import LazyTensor
from ..quantized.affine import Affine
from ..quantized.bundle import Bundle, Component, Decode, DimMap, StoredValues
from ..quantized.format import Format, Shapes, Tensors
from .header import Blocks
from .names import model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCKS = "blocks"
"""The name of a weight's stored tensor."""


@dataclass(frozen=True)
class Gguf(Format):
    """Every tensor that is stored in blocks."""

    title = "GGUF"
    is_written = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Gguf:
        """See `Format.of`; there are no settings, since each tensor has its type in the file."""
        return cls()

    def dequantized(self, tensors: Tensors, *, stays_packed: bool = False) -> dict[str, LazyTensor]:
        return {
            name: _bundle(name, tensor) if isinstance(tensor, Blocks) else tensor for name, tensor in tensors.items()
        }

    def named(self, model: PreTrainedModel, tensors: Tensors, shapes: Shapes) -> tuple[Tensors, Sequence[Any]]:
        return model_tensors(model, tensors, shapes)


def _bundle(name: str, blocks: Blocks) -> Bundle:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(blocks.kind)
    length, nbytes = GGML_QUANT_SIZES[kind]
    *leading, width = blocks.shape
    dim_maps = (*(DimMap(dim) for dim in range(len(leading))), DimMap(len(leading), length, nbytes))
    shape = (*leading, width // nbytes * length)
    decode: Decode = partial(_decode, kind)
    if kind.name in _FOUR_BITS:
        integers, scales = partial(_integers, nbytes), partial(_by_group, _FOUR_BITS[kind.name], nbytes)
        decode = Affine(decode, 4, 32, BLOCKS, integers, scales, adds=kind.name != "Q4_0")
    return Bundle({BLOCKS: Component(blocks, dim_maps, name)}, shape, torch.float32, decode)


def _decode(kind: Any, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    from gguf import dequantize

    blocks = stored[BLOCKS]
    values = torch.from_numpy(dequantize(blocks.cpu().contiguous().numpy(), kind))
    return values.view(*shape).to(blocks.device)


def _integers(nbytes: int, stored: StoredValues, shape: Sequence[int]) -> torch.Tensor:
    """(rows, columns) uint8: the last bytes of a block have the low halves of as many integers, then the high ones.

    Q4_0 and Q4_1 have 16 such bytes, Q4_K four times 32.
    """
    blocks = stored[BLOCKS].reshape(-1, nbytes)
    pairs = blocks[:, -16:] if nbytes < 32 else blocks[:, -128:].reshape(-1, 4, 32)
    return torch.stack((pairs & 0xF, pairs >> 4), -2).reshape(*shape)


def _by_group(
    scales: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]],
    nbytes: int,
    stored: StoredValues,
    shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor | int]:
    scale, zero = scales(stored[BLOCKS].reshape(-1, nbytes))
    zero = zero.reshape(shape[0], -1) if isinstance(zero, torch.Tensor) else zero
    return scale.reshape(shape[0], -1), zero


def _halves(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The float16 numbers at the beginning of each block, (blocks, count) in float32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _scales_q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    return _halves(blocks, 1), 8


def _scales_q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, value = _halves(blocks, 2).unbind(1)
    return scale, value


def _scales_q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and minima of a block, of 6 bits each, are packed in 12 bytes, and scaled once more."""
    low, mid, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 0xF) | (low >> 6) << 4), 1)
    minima = torch.cat((mid & 63, (high >> 4) | (mid >> 6) << 4), 1)
    scale, minimum = _halves(blocks, 2).split(1, 1)
    return scale * scales, -minimum * minima


_FOUR_BITS: Mapping[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | int]]] = {
    "Q4_0": _scales_q4_0,
    "Q4_1": _scales_q4_1,
    "Q4_K": _scales_q4_k,
}
"""Types with integers of 4 bits, which an operator multiplies -> scales and zero points, or values of 0, of a block."""
