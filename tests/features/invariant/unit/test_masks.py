"""Masks of dropout and blocks of products with the bits of one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tp_transformers import UnsupportedError
from tp_transformers.features.invariant.masks import FullDraws
from tp_transformers.features.invariant.products import BLOCK, InBlocks
from tp_transformers.features.verify.small_models.model import on_threads
from tp_transformers.slices.layout import Ranks

HEADS, FEATURES = Ranks(2).split(3), Ranks(2).split(24)


def drop(shape: tuple[int, ...], *, of_heads: bool) -> torch.Tensor:
    """The mask that rank 0 of 2 draws for a dropout of `shape`."""
    with FullDraws(0, HEADS if of_heads else None, [FEATURES]):
        return torch.empty(shape).bernoulli_(0.5)


@pytest.mark.parametrize(
    ("shape", "of_heads", "full"),
    [
        ((2, 2, 5, 12), True, (2, 3, 5, 12)),  # as many keys as local features
        ((2, 4, 2, 5, 12), True, (2, 4, 3, 5, 12)),  # of local attention
        ((2, 5, 12), False, (2, 5, 24)),
    ],
)
def test_masks_are_slices_of_full_ones(shape, of_heads, full) -> None:
    torch.manual_seed(0)
    expected = torch.empty(full).bernoulli_(0.5)
    dim = next(dim for dim in range(len(full)) if full[dim] != shape[dim])
    torch.manual_seed(0)
    assert torch.equal(drop(shape, of_heads=of_heads), expected.narrow(dim, 0, shape[dim]))


@pytest.mark.parametrize("shape", [(4, 5, 12), (2, 1, 5, 12)])
def test_other_masks_of_heads_are_refused(shape) -> None:
    """Those of XGLM are (batch * heads, queries, keys)."""
    with pytest.raises(UnsupportedError, match="heads, queries, keys"):
        drop(shape, of_heads=True)


LENGTHS = (130, 200, 257, 1000, 1003)
"""None is a multiple of a block."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_have_the_bits_of_the_full_product(length, dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(length, 96).to(dtype)
    with on_threads(1):
        for rows in (1, 2, 3, 7, 16, 33):
            x = torch.randn(rows, 96).to(dtype)
            full = linear(x, weight)
            for size in range(2, length // BLOCK + 1):
                for ((start, stop),) in InBlocks().split_part(length, Ranks(size)).ranges:
                    assert stop - start >= BLOCK
                    part = linear(x, weight[start:stop].clone())
                    assert torch.equal(part, full[:, start:stop]), (rows, size, start, stop)
