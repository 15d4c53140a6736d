"""Weights that compressed-tensors itself packs, against those that it unpacks; where the library is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.quantisers import compress
from tp_transformers.features.quantized.compressed import Compressed
from tp_transformers.slices.lazy import Resident

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow

ROWS, COLUMNS = 40, 96
GROUP: dict[str, Any] = {"strategy": "group", "group_size": 32}
INTEGERS: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", {"num_bits": bits, "symmetric": symmetric, **scales})
    for bits in (2, 3, 4, 5, 6, 7, 8)
    for symmetric in (True, False)
    for scales in (GROUP, {"strategy": "channel"})
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("naive-quantized", {"num_bits": 8, "symmetric": False, **GROUP}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
]


MICRO: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
]
CASES = [(*case, dtype) for case in (*INTEGERS, *OTHERS) for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("form", "weights", "dtype"), [*CASES, *((*case, torch.bfloat16) for case in MICRO)])
def test_a_weight_is_what_the_library_makes_of_it(form, weights, dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, dtype=dtype)
    state, expected = compress(form, weights, weight)
    settings = {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    found = Compressed.of(settings).dequantized({f"a.{name}": Resident(value) for name, value in state.items()})
    assert found.keys() == {"a.weight"}
    assert found["a.weight"].dtype == dtype
    assert torch.equal(found["a.weight"].materialize(), expected)
    part = found["a.weight"].select(0, [(3, 21), (30, 33)]).select(1, [(11, 70)]).materialize()
    assert torch.equal(part, torch.cat((expected[3:21], expected[30:33]))[:, 11:70])
    if weights.get("type") == "float":
        assert (expected.float() - weight.float()).abs().max() < 1
