"""Casts from float8 against those of torch."""

from __future__ import annotations

import pytest
import torch

from tp_transformers.features.quantized.casts import from_float8, has_nan, shifted_float8


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("without", [set(), {0x7F}, {0xFF}, {0x7F, 0xFF}])  # the NaN of float8_e4m3fn
def test_every_float8_has_the_bits_of_torch(kind, without) -> None:
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
