"""Blocks of columns of an invariant product have the bits of torch's product of all columns."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tp_transformers.features.invariant.products import BLOCK, in_blocks
from tp_transformers.features.verify.small_models.model import on_threads
from tp_transformers.slices.layout import Ranks

LENGTHS = (130, 200, 257, 1000, 1003)
"""None is a multiple of a block."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_have_the_bits_of_the_full_product(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(length, 96).to(dtype)
    with on_threads(1):
        for rows in (1, 2, 3, 7, 16, 33):
            x = torch.randn(rows, 96).to(dtype)
            full = linear(x, weight)
            for size in range(2, length // BLOCK + 1):
                for ((start, stop),) in in_blocks(length, Ranks(size)).ranges:
                    assert stop - start >= BLOCK
                    part = linear(x, weight[start:stop].clone())
                    assert torch.equal(part, full[:, start:stop]), (rows, size, start, stop)
