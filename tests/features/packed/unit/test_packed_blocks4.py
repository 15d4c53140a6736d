"""nf4 and fp4 by bitsandbytes' kernels for CPUs, by the package if it is installed, and by stand-ins; GPUs by these."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.formats import NF4
from tests.features.packed.unit.test_packed import check_product, packed, scales, sliced
from tp_transformers.features.packed import blocks4
from tp_transformers.features.packed.blocks4 import Blocks4, Blocks4Cuda
from tp_transformers.features.packed.weight import _OPERATORS, DECODED, with_products
from tp_transformers.features.quantized.bitsandbytes import BitsAndBytes
from tp_transformers.slices.lazy import LazyTensor, Resident

HAS_PACKAGE = importlib.util.find_spec("bitsandbytes") is not None
ROWS, COLUMNS, BLOCK = 104, 224, 32
VALUES = torch.tensor(NF4)


def multiply(x: Tensor, packed: Tensor, shape: list[int], scales: Tensor, values: Tensor, block: int) -> Tensor:
    """`bitsandbytes::gemv_4bit` for a CPU."""
    rows, columns = shape
    assert rows % 32 == 0
    assert columns % block == 0
    assert x.dtype == scales.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert packed.is_contiguous()
    assert scales.shape == (columns // block, rows)
    assert scales.is_contiguous()
    # As `_convert_weight_packed_for_cpu_inverse`.
    halves = packed.view(-1, 32)
    both = torch.cat((halves & 0xF, halves >> 4), -1).view(rows // 32, columns // 2, 32, 2)
    weight = values[both.transpose(1, 2).reshape(rows, columns).long()]
    return linear(x.float(), weight * scales.float().t().repeat_interleave(block, 1)).bfloat16()


def dequantise(pairs: Tensor, scales: Tensor, block: int, kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """`bitsandbytes::dequantize_4bit`."""
    assert kind == "nf4"
    assert scales.dtype == torch.float32
    assert scales.shape == (shape[0] * shape[1] // block,)
    values = VALUES[torch.stack((pairs >> 4, pairs & 0xF), -1).long()].view(-1, block) * scales[:, None]
    return values.view(shape).to(dtype)


def multiply_one(x: Tensor, pairs: Tensor, shape: list[int], scales: Tensor, values: Tensor, block: int) -> Tensor:
    """`bitsandbytes::gemv_4bit` for a GPU, which reads the addresses of all arguments by these dtypes."""
    rows, columns = shape
    assert x.shape == (1, columns)
    assert x.dtype == torch.bfloat16
    assert scales.dtype == values.dtype == torch.float32
    assert pairs.dtype == torch.uint8
    assert pairs.numel() * 2 == scales.numel() * block == rows * columns
    scales = scales.flatten()  # the kernel reads it as such
    assert all(each.is_contiguous() for each in (x, pairs, scales, values))
    exact = dequantise(pairs.flatten(), scales, block, "nf4", shape, torch.float32)
    return linear(x.float(), exact).bfloat16()


def stand_in(monkeypatch: pytest.MonkeyPatch, product: Any) -> None:
    operators = SimpleNamespace(gemv_4bit=product, dequantize_4bit=dequantise)
    monkeypatch.setattr(blocks4, "_package", lambda: operators)
    monkeypatch.setattr(blocks4, "_maps", lambda device: {"nf4": VALUES})
    blocks4._is_exact.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are handled as those of a GPU."""
    stand_in(monkeypatch, multiply_one)
    monkeypatch.setattr("tp_transformers.features.packed.weight._OPERATORS", {"cpu": _OPERATORS["cuda"]})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture(params=["stand-in", "bitsandbytes"])
def package(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        stand_in(monkeypatch, multiply)
    elif not blocks4._maps("cpu"):
        pytest.skip("bitsandbytes is not installed, or has no kernel for this processor")
    return str(request.param)


def weight(values: Tensor = VALUES, *, nested: bool = False, block: int = BLOCK) -> LazyTensor:
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    count = ROWS * COLUMNS // block
    stored = {"weight": torch.randint(256, (ROWS * COLUMNS // 2, 1), dtype=torch.uint8), "weight.quant_map": values}
    stored["weight.absmax"] = torch.randint(256, (count,), dtype=torch.uint8) if nested else scales(count)
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.5}
        stored |= {"weight.nested_absmax": scales(-(-count // 256)), "weight.nested_quant_map": scales(256)}
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {f"m.{name}": Resident(tensor) for name, tensor in stored.items()}
    return BitsAndBytes.of({}).dequantized(tensors)["m.weight"]


def check_slices(kind: type, nested: bool, data: st.DataObject) -> None:
    torch.manual_seed(0)
    lazy = sliced(weight(nested=nested), data)
    for tokens in (1, 5, 70):
        check_product(lazy, packed(lazy), kind, torch.randn(tokens, lazy.shape[1]).bfloat16())
    held = with_products(packed(lazy))
    assert torch.equal(held.decoded(), lazy.materialize())
    if kind is Blocks4Cuda:
        assert held.nbytes == packed(lazy).nbytes, "as in the file"


@pytest.mark.parametrize("nested", [False, True])
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_of_any_slice(package, nested, data) -> None:
    check_slices(Blocks4, nested, data)


@pytest.mark.parametrize("nested", [False, True])
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_of_any_slice_on_a_gpu(gpu, nested, data) -> None:
    check_slices(Blocks4Cuda, nested, data)


def test_a_kernel_for_gpus_that_computes_something_else_is_not_used(gpu, monkeypatch) -> None:
    stand_in(monkeypatch, lambda x, pairs, shape, *_: x.new_zeros(1, shape[0]))
    assert with_products(packed(weight())).product == DECODED


def test_other_values_and_blocks_are_decoded(package) -> None:
    for lazy in (weight(VALUES + 1e-3), weight(block=16)):
        assert with_products(packed(lazy)).product == DECODED


def test_a_kernel_that_computes_something_else_is_not_used(package, monkeypatch) -> None:
    blocks4._is_exact.cache_clear()
    monkeypatch.setattr(blocks4, "_multiply", lambda x, packed, *_: x.new_zeros(len(x), len(packed)))
    assert with_products(packed(weight())).product == DECODED
    blocks4._is_exact.cache_clear()


def test_without_the_package_weights_are_decoded(monkeypatch) -> None:
    monkeypatch.setattr(blocks4, "find_spec", lambda name: None)
    blocks4._maps.cache_clear()
    assert with_products(packed(weight())).product == DECODED
    blocks4._maps.cache_clear()


@pytest.mark.skipif(not HAS_PACKAGE, reason="bitsandbytes is not installed")
def test_the_layout_is_that_of_the_package() -> None:
    from bitsandbytes.functional import _convert_weight_packed_for_cpu, quantize_4bit

    stored, state = quantize_4bit(torch.randn(96, 160).bfloat16(), blocksize=32, quant_type="nf4")
    pairs = stored.clone().view(96, 80)
    theirs, _ = _convert_weight_packed_for_cpu(stored, state)
    assert torch.equal(blocks4.pack(pairs), theirs)
    assert torch.equal(blocks4.unpack(theirs), pairs)
