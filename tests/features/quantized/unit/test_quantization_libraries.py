"""Weights that compressed-tensors itself packs, against those that it unpacks; where the library is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "weights"), [*INTEGERS, *OTHERS])
def test_a_weight_is_what_the_library_makes_of_it(form: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    weight, args = torch.randn(ROWS, COLUMNS, dtype=dtype), QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    strategy = weights["strategy"]
    if strategy == "group":
        low, high = torch.aminmax(weight.unflatten(1, (-1, 32)), dim=-1)
    elif strategy == "block":
        blocks = torch.nn.functional.pad(weight, (0, 0, 0, 8)).view(3, 16, 3, 32)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif strategy == "channel":
        low, high = torch.aminmax(weight, dim=-1, keepdim=True)
    else:
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    state = {name: value for name, value in state.items() if value is not None}
    expected = compressor.decompress(state, scheme)["weight"]

    check(form, weights, state, expected, dtype)


def check(
    form: str, weights: dict[str, Any], state: dict[str, torch.Tensor], expected: torch.Tensor, dtype: torch.dtype
) -> None:
    settings = {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    found = Compressed.of(settings).dequantized({f"a.{name}": Resident(value) for name, value in state.items()})
    assert found.keys() == {"a.weight"}
    assert found["a.weight"].dtype == dtype
    assert torch.equal(found["a.weight"].materialize(), expected)
    part = found["a.weight"].select(0, [(3, 21), (30, 33)]).select(1, [(11, 70)]).materialize()
    assert torch.equal(part, torch.cat((expected[3:21], expected[30:33]))[:, 11:70])


MICRO: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
]


@pytest.mark.parametrize(("form", "weights"), MICRO)
def test_a_weight_of_small_groups_is_what_the_library_makes_of_it(form: str, weights: dict[str, Any]) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    is_nv = weights["strategy"] == "tensor_group"
    args = QuantizationArgs(**weights, scale_dtype=torch.float8_e4m3fn if is_nv else torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = torch.aminmax(weight.unflatten(1, (-1, weights["group_size"])), dim=-1)
    divisor = generate_gparam(weight.min(), weight.max()).reshape(1) if is_nv else None
    scale, _ = calculate_qparams(low, high, args, global_scale=divisor)
    given = {"weight": weight, "weight_scale": scale}
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress(given | ({"weight_global_scale": divisor} if is_nv else {}), scheme)
    expected = compressor.decompress(state, scheme)["weight"]
    check(form, weights, state, expected, torch.bfloat16)
    assert (expected.float() - weight.float()).abs().max() < 1
