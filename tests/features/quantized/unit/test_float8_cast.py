"""Casts from float8 against those of torch."""

from __future__ import annotations

import pytest
import torch

from tp_transformers.checkpoint.reading.memory import copy, from_float8, has_nan, shifted_float8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nan", [True, False])
def test_every_float8_is_cast_as_torch_does(dtype: torch.dtype, nan: bool) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(3000).view(-1, 64)
    if not nan:
        every = torch.where(every.float().isnan(), 0, every.float()).to(torch.float8_e4m3fn)
    for destination in (torch.empty(every.shape, dtype=dtype), torch.empty(every.shape[::-1], dtype=dtype).t()):
        copy(every, destination)
        assert torch.equal(destination.nan_to_num(7), every.to(dtype).nan_to_num(7))
        copy(every[:, 3:21], destination[:, :18])
        assert torch.equal(destination[:, :18].nan_to_num(7), every[:, 3:21].to(dtype).nan_to_num(7))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("without", [set(), {0x7F}, {0xFF}, {0x7F, 0xFF}])  # the NaN of float8_e4m3fn
def test_every_float8_has_the_bits_of_torch(kind: torch.dtype, without: set[int]) -> None:
    every = torch.tensor([byte for byte in range(256) if byte not in without], dtype=torch.uint8).view(kind)
    expected = every.float()
    values = from_float8(every)
    assert values.dtype == torch.float32
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(7).view(torch.int32), expected.nan_to_num(7).view(torch.int32))
    if kind == torch.float8_e4m3fn:
        assert has_nan(every) == bool(expected.isnan().any())
        if len(without) == 2:
            for values in (shifted_float8(every), shifted_float8(every, torch.empty(2 * len(every)))):
                assert torch.equal(values * 256, expected)
