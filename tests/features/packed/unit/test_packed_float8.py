"""Packed float8 weights in the layout for GPUs, with a stand-in that checks what `scaled_mm` of torch checks.

The stand-in follows `aten/src/ATen/native/cuda/ScaledBlas.cpp`, calls torch's own checks, and computes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from tests.features.packed.unit.test_packed import check_stored, float8_values, of_module, packed, scales
from tests.unit.slices.test_lazy import ranges
from tp_transformers.features.packed import float8
from tp_transformers.features.packed.float8 import Float8Cuda
from tp_transformers.features.packed.weight import DECODED, with_products
from tp_transformers.features.quantized.compressed import Compressed
from tp_transformers.features.quantized.float8 import Float8
from tp_transformers.slices.lazy import LazyTensor

ScalingType: Any = getattr(torch.nn.functional, "ScalingType", None)
pytestmark = pytest.mark.skipif(ScalingType is None, reason="since torch 2.10")

ROWS, COLUMNS, BLOCK = 280, 428, 128
COUNTS = (3, 4)
"""Blocks of the rows and of the columns."""


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: ScalingType,
    scale_b: Tensor,
    recipe_b: ScalingType,
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """`torch.nn.functional.scaled_mm`: (a * scale_a) @ (b * scale_b)."""
    (tokens, columns), rows = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert b.shape[0] == columns
    assert columns % 16 == rows % 16 == 0
    assert a.stride() == (columns, 1)  # row-major
    assert b.stride() == (1, columns)  # column-major
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert output_dtype == torch.bfloat16
    on_meta = [each.to("meta") for each in (a, b, scale_a, scale_b)]
    torch.nn.functional.scaled_mm(*on_meta[:3], recipe_a, on_meta[3], recipe_b, output_dtype=output_dtype)
    if recipe_a == ScalingType.RowWise:
        assert recipe_b == ScalingType.RowWise
        assert scale_a.shape == (tokens, 1)
        assert scale_b.shape == (1, rows)
        assert scale_b.stride(1) == 1
        assert scale_a.is_contiguous()
    else:
        assert (recipe_a, recipe_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        blocks = -(-columns // BLOCK)
        padded = -(-blocks // 4) * 4
        assert scale_a.shape == (tokens, blocks)
        assert scale_a.stride(0) == 1
        assert scale_a.stride(1) == tokens or blocks == scale_a.stride(1) == 1
        assert tokens % 4 == 0  # strides of 16 bytes
        assert scale_b.shape == (padded, -(-rows // BLOCK))
        assert scale_b.stride(0) == 1
        assert scale_b.stride(1) == padded or scale_b.shape[1] == scale_b.stride(1) == 1
        scale_a = scale_a.repeat_interleave(BLOCK, 1)[:, :columns]
        scale_b = scale_b[:blocks].repeat_interleave(BLOCK, 0)[:columns].repeat_interleave(BLOCK, 1)[:, :rows]
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(output_dtype)


def by_blocks(**settings: Any) -> LazyTensor:
    stored = of_module({"weight": float8_values(ROWS, COLUMNS), "weight_scale_inv": scales(*COUNTS)})
    return Float8.of({"weight_block_size": [BLOCK] * 2, **settings}).dequantized(stored)["m.weight"]


def by_tensor(dtype: torch.dtype = torch.float8_e4m3fn) -> LazyTensor:
    stored = of_module({"weight": float8_values(ROWS, COLUMNS, dtype), "weight_scale_inv": scales(1)})
    return Float8.of({}).dequantized(stored)["m.weight"]


def compressed(kind: str, shape: tuple[int, int], **inputs: Any) -> LazyTensor:
    weights = {"type": "float", "strategy": kind, "block_structure": [BLOCK, BLOCK]}
    inputs = {"type": "float", "num_bits": 8, "dynamic": True, **inputs}
    groups = {"all": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    stored = of_module({"weight": float8_values(ROWS, COLUMNS), "weight_scale": scales(*shape).bfloat16()})
    return Compressed.of({"format": "float-quantized", "config_groups": groups}).dequantized(stored)["m.weight"]


FORMATS: dict[str, tuple[Callable[[], LazyTensor], int]] = {
    "fp8 in blocks": (by_blocks, BLOCK),
    "fp8": (by_tensor, COLUMNS),
    "compressed-tensors, FP8_DYNAMIC": (lambda: compressed("channel", (ROWS, 1), strategy="token"), COLUMNS),
    "compressed-tensors, FP8_BLOCK": (
        lambda: compressed("block", COUNTS, strategy="group", group_size=BLOCK),
        BLOCK,
    ),
}
"""Name -> weight, and the columns of a token that share a scale."""


def quantised(x: Tensor, group: int) -> Tensor:
    """Round x to float8 with a scale of max / 448 for each group of columns."""
    parts = []
    for part in x.float().split(group, 1):
        scale = part.abs().amax(1, keepdim=True) / 448
        parts.append(torch.where(scale > 0, (part / scale).to(torch.float8_e4m3fn).float() * scale, 0))
    return torch.cat(parts, 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are handled as those of a GPU, with the stand-in as operator."""
    monkeypatch.setattr(float8, "scaled_mm", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr("tp_transformers.features.packed.weight._OPERATORS", {"cpu": (Float8Cuda,)})


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_of_any_slice(gpu, name, data) -> None:
    torch.manual_seed(0)
    make, group = FORMATS[name]
    lazy = make()
    rows, columns = [(0, ROWS)], [(0, COLUMNS)]
    for dim in data.draw(st.sets(st.integers(0, 1))):
        chosen = data.draw(ranges(lazy.shape[dim]))
        rows, columns = (chosen, columns) if dim == 0 else (rows, chosen)
    full = lazy.materialize().float()
    lazy = lazy.select(0, rows).select(1, columns)
    if not lazy.numel():
        return
    stored = packed(lazy)
    weight = with_products(stored)
    (before,), (after,) = stored.blocks, weight.blocks
    assert isinstance(after.matrix, Float8Cuda)
    selected_rows = torch.cat([torch.arange(*pair) for pair in rows])
    for tokens in (1, 5, 70):
        x = torch.randn(tokens, lazy.shape[1]).bfloat16()
        x[0] *= 50
        x[-1] = 0
        wide = torch.zeros(tokens, COLUMNS, dtype=x.dtype)
        for (start, stop), part in zip(columns, x.split([stop - start for start, stop in columns], 1), strict=True):
            wide[:, start:stop] += part
        inputs = quantised(wide, group)
        expected, size = linear(inputs, full[selected_rows]), linear(inputs.abs(), full[selected_rows].abs())
        # `full` and the result are rounded to bfloat16, by 2^-8 at most each; sums are in fp32.
        assert ((weight.linear(x).float() - expected).abs() <= 1.01 * 2**-8 * (size + expected.abs())).all()
    assert torch.equal(weight.decoded(), lazy.materialize().bfloat16())
    check_stored(before, after)


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_blocks(activation_scheme="static"),
        lambda: by_tensor(torch.float8_e5m2),
        lambda: compressed("channel", (ROWS, 1), strategy="token", dynamic=False),
        lambda: compressed("channel", (ROWS, 1), strategy="token", num_bits=4),
        lambda: compressed("channel", (ROWS, 1), strategy="group", group_size=BLOCK),
        lambda: compressed("block", COUNTS, strategy="token"),
        lambda: compressed("block", COUNTS, strategy="group", group_size=64),
    ],
)
def test_activations_are_quantised_only_as_the_checkpoint_says(gpu, make) -> None:
    assert with_products(packed(make())).product == DECODED


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("lacks", "is_decoded"),
    [
        ((float8, "scaled_mm", None), {"blocks": True, "rows": True}),
        ((torch.version, "hip", "6.4"), {"blocks": True, "rows": True}),
        ((torch.version, "cuda", None), {"blocks": True, "rows": True}),
        ((torch.version, "cuda", "12.8"), {"blocks": True, "rows": False}),
        ((torch.cuda, "get_device_capability", lambda device: (8, 6)), {"blocks": True, "rows": True}),
        ((torch.cuda, "get_device_capability", lambda device: (8, 9)), {"blocks": True, "rows": False}),
        ((torch.cuda, "get_device_capability", lambda device: (10, 0)), {"blocks": True, "rows": False}),
        ((torch.cuda, "get_device_capability", lambda device: (12, 0)), {"blocks": True, "rows": True}),
    ],
)
def test_without_the_operator_weights_are_decoded(gpu, monkeypatch, name, lacks, is_decoded) -> None:
    make, group = FORMATS[name]
    monkeypatch.setattr(*lacks)
    is_without = with_products(packed(make())).product == DECODED
    assert is_without == is_decoded["blocks" if group == BLOCK else "rows"]
