"""Packed weights in the operators' layouts for GPUs, with stand-ins that check what the operators of torch check.

The stand-ins follow `aten/src/ATen/native/cuda/int4mm.cu` lane by lane, and compute on a CPU.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from tests.unit.model.test_packed import FORMATS, check_product, packed
from tests.unit.slices.test_lazy import ranges
from tp_transformers.model.packed import int4_cuda, products
from tp_transformers.model.packed.int4_cuda import Int4Cuda
from tp_transformers.model.packed.products import with_products
from tp_transformers.slices.lazy import LazyTensor


def convert(weight: Tensor, inner: int) -> Tensor:
    """`aten::_convert_weight_to_int4pack`."""
    assert weight.ndim == 2
    assert weight.dtype == torch.uint8
    assert weight.is_contiguous()
    assert inner in (2, 4, 8)
    rows, pairs = weight.shape
    assert pairs * 2 % (inner * 16) == 0
    assert rows % 8 == 0  # others would be read as zeros
    packed = torch.empty(rows // 8, pairs * 2 // (inner * 16), 32, inner // 2, dtype=torch.int32)
    outer = torch.arange(packed.shape[1])
    for lane, word in product(range(32), range(inner // 2)):
        first = (outer * inner + 2 * word) * 8 + lane % 4
        bytes_ = [weight[lane // 4 :: 8, first + 4 * each].long() for each in range(4)]
        nibbles = [byte >> 4 for byte in bytes_] + [byte & 15 for byte in bytes_]
        packed[:, :, lane, word] = sum(nibble << 4 * place for place, nibble in enumerate(nibbles)).int()
    return packed


def multiply(x: Tensor, weight: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """`aten::_weight_int4pack_mm`: `x @ ((integers - 8) * scales + zeros).T`."""
    assert x.ndim == 2
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert weight.dtype == torch.int32
    assert weight.is_contiguous()
    assert weight.ndim == 4
    columns, inner, rows = x.shape[1], weight.shape[3] * 2, len(weight) * 8
    assert inner in (2, 4, 8)
    assert weight.shape[1:3] == (columns // (inner * 16), 32)
    assert group in (32, 64, 128, 256)
    assert columns >= group
    assert columns % group == 0
    assert scales_and_zeros.shape == (columns // group, rows, 2)
    assert scales_and_zeros.is_contiguous()  # its kernel reads data_ptr() by these sizes
    integers = torch.empty(rows, columns)
    outer = torch.arange(weight.shape[1])
    for lane, word, place in product(range(32), range(inner // 2), range(8)):
        column = (outer * inner + 2 * word) * 16 + 2 * (lane % 4) + 8 * (place % 4) + place // 4
        integers[lane // 4 :: 8, column] = (weight[:, :, lane, word] >> 4 * place & 15).float()
    scales, zeros = (each.float().t().repeat_interleave(group, 1) for each in scales_and_zeros.unbind(2))
    return linear(x.float(), (integers - 8) * scales + zeros).bfloat16()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are handled as those of a GPU, with the stand-ins as operators."""
    monkeypatch.setattr(int4_cuda, "pack_int4_for_gpu", convert)
    monkeypatch.setattr(int4_cuda, "int4_product_of_gpu", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "_OPERATORS", {"cpu": (Int4Cuda,)})


def sliced(name: str, data: st.DataObject) -> LazyTensor:
    torch.manual_seed(0)
    lazy = FORMATS[name][0]()
    for dim in data.draw(st.sets(st.integers(0, 1))):
        lazy = lazy.select(dim, data.draw(ranges(lazy.shape[dim])))
    return lazy


@pytest.mark.parametrize("name", ["gptq", "awq", "int4", "int4 with zeros"])
@given(data=st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_of_any_slice(gpu: None, name: str, data: st.DataObject) -> None:
    lazy = sliced(name, data)
    if not lazy.numel():
        return
    for tokens in (1, 5, 70):
        check_product(lazy, packed(lazy), Int4Cuda, torch.randn(tokens, lazy.shape[1]).bfloat16())


@pytest.mark.parametrize("lacks", ["pack_int4_for_gpu", "int4_product_of_gpu", "capability", "hip"])
def test_without_the_operators_weights_are_decoded(gpu: None, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    changes: dict[str, tuple[Any, str, Any]] = {
        "capability": (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        "hip": (torch.version, "hip", "6.4"),
    }
    monkeypatch.setattr(*changes.get(lacks, (int4_cuda, lacks, None)))
    assert with_products(packed(FORMATS["gptq"][0]())).blocks[0].product is None
