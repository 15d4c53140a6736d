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
from torch.utils._python_dispatch import TorchDispatchMode

from tests.features.packed.unit.test_packed import check_product, mxfp4_experts, packed, sliced, weight_of
from tp_transformers.features.packed import integers
from tp_transformers.features.packed.integers import Int4Cuda, Int8Gpu
from tp_transformers.features.packed.weight import _OPERATORS, DECODED, pack, with_products
from tp_transformers.features.quantized import bundle
from tp_transformers.features.quantized import format as formats


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
    monkeypatch.setattr(integers, "pack_int4_for_gpu", convert)
    monkeypatch.setattr(integers, "int4_product_of_gpu", multiply)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("tp_transformers.features.packed.weight._OPERATORS", {"cpu": (Int4Cuda,)})


@pytest.fixture
def int8_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_transformers.features.packed.weight._OPERATORS", {"cpu": _OPERATORS["cuda"][1:]})
    monkeypatch.setattr(integers, "int8_product", lambda *_: pytest.fail("by torch's operator"))


of_any_slice = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_slices(name: str, kind: type, data: st.DataObject) -> None:
    torch.manual_seed(0)
    lazy = sliced(weight_of(name), data)
    for tokens in (1, 5, 70):
        check_product(lazy, packed(lazy), kind, torch.randn(tokens, lazy.shape[1]).bfloat16())


@pytest.mark.parametrize("name", ["gptq", "awq", "int4", "int4 with zeros"])
@given(data=st.data())
@of_any_slice
def test_products_of_any_slice(gpu, name, data) -> None:
    check_slices(name, Int4Cuda, data)


@pytest.mark.parametrize("name", ["int8", "int8 packed", "bitsandbytes"])
@given(data=st.data())
@of_any_slice
def test_int8_is_multiplied_as_bfloat16(int8_on_a_gpu, name, data) -> None:
    """torch's operator reads the weight several times as slowly as a product in bfloat16."""
    check_slices(name, Int8Gpu, data)


class Operators(TorchDispatchMode):
    """The operators that are called, with the devices of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self.seen.append((func.__name__, args[0].device.type))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(name == each for each, _ in self.seen)


@pytest.mark.parametrize("name", ["gptq", "int8", "fp8 in blocks", "mxfp4"])
def test_a_gpu_decodes_a_matrix_whole(monkeypatch, name) -> None:
    """Pieces of a CPU's size take longer to start than to compute; a table on the CPU would let the host wait."""
    monkeypatch.setattr(bundle, "_TILE", 1 << 10)
    lazy = mxfp4_experts() if name == "mxfp4" else weight_of(name)
    made = pack(lazy, torch.bfloat16, torch.device("meta"))  # stands for a GPU
    weight = made[0].select(0).transposed if lazy.ndim == 3 else made[0]
    formats.constant.cache_clear()
    weight.linear(torch.empty(3, weight.shape[1], dtype=torch.bfloat16, device="meta"))  # copies tables, once
    with Operators() as product:
        weight.linear(torch.empty(3, weight.shape[1], dtype=torch.bfloat16, device="meta"))
    assert product.count("mm.out") == 1
    assert ("_to_copy.default", "cpu") not in product.seen
    with Operators() as decoded:
        weight.decoded()
    assert decoded.count("copy_.default") == 1


class Allocations(TorchDispatchMode):
    """The largest tensor that is made, of those that have memory, in elements."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta:
            self.most = max(self.most, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("name", ["gptq", "int8", "fp8 in blocks"])
def test_a_load_makes_no_dense_weight(name) -> None:
    """Not even for a moment: on a GPU its memory would stay with the allocator."""
    lazy = weight_of(name)
    with Allocations() as made:
        weight = packed(lazy)
    assert 0 < made.most < lazy.numel() * 2
    assert torch.equal(weight.decoded(), lazy.materialize().bfloat16())


@pytest.mark.parametrize("lacks", ["pack_int4_for_gpu", "int4_product_of_gpu", "capability", "hip"])
def test_without_the_operators_weights_are_decoded(gpu, monkeypatch, lacks) -> None:
    changes: dict[str, tuple[Any, str, Any]] = {
        "capability": (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        "hip": (torch.version, "hip", "6.4"),
    }
    monkeypatch.setattr(*changes.get(lacks, (integers, lacks, None)))
    assert with_products(packed(weight_of("gptq"))).product == DECODED
