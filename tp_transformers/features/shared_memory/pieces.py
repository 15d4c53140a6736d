"""Sums of the tensors in slots, and chunks of tensors that are longer than a slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

_SHORT = (torch.float16, torch.bfloat16)


@cache
def check_dtype(dtype: torch.dtype, *, is_maximum: bool = False) -> None:
    """Raise torch's error for a dtype without a sum or maximum, before a rank begins the collective."""
    numbers = [torch.empty(1, dtype=dtype) for _ in range(3)]
    combine(numbers[:2], numbers[2], is_maximum=is_maximum)


def combine(slots: Sequence[Tensor], out: Tensor, *, is_maximum: bool = False) -> None:
    """Write the sum of the slots, in order, or their maximum to `out`, which is not one of them."""
    first, second, *rest = slots
    if is_maximum:
        torch.maximum(first, second, out=out)
        for slot in rest:
            torch.maximum(out, slot, out=out)
    elif out.dtype in _SHORT:
        total = first.float()
        for slot in (second, *rest):
            total += slot
        out.copy_(total)
    else:
        torch.add(first, second, out=out)
        for slot in rest:
            out += slot


def chunks(nbytes: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks of at most `nbytes`; longer tensors have to be contiguous and of one shape."""
    if tensors[0].nbytes <= nbytes:
        yield tensors
    else:
        yield from zip(*(tensor.view(-1).split(nbytes // tensor.itemsize) for tensor in tensors), strict=True)


def starts_of(counts: Sequence[int], width: int) -> list[int]:
    """Byte offsets of consecutive chunks with `counts` rows of `width` bytes, and the end of the last."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count * width)
    return starts
