"""Packed weights in the layouts of operators, for any slice, against products with decoded weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from tests.support.comparisons import relative
from tests.unit.slices.test_lazy import ranges
from tp_transformers.features.packed import float8, integers
from tp_transformers.features.packed.integers import Int4
from tp_transformers.features.packed.tensor import PackedTensor
from tp_transformers.features.packed.weight import DECODED, PackedBlock, PackedWeight, pack, with_products
from tp_transformers.features.quantized.bitsandbytes import BitsAndBytes
from tp_transformers.features.quantized.compressed import Compressed
from tp_transformers.features.quantized.float8 import Float8
from tp_transformers.features.quantized.format import Format
from tp_transformers.features.quantized.mxfp4 import Mxfp4
from tp_transformers.features.quantized.words import Awq, Gptq
from tp_transformers.slices.lazy import LazyTensor, Resident

ROWS, COLUMNS, GROUP = 104, 224, 32
ROUNDING = 2e-2
"""Error of bfloat16 scales and sums, relative to the largest value."""


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def compressed(form: str, **weights: Any) -> Format:
    weights = {"strategy": "group" if "group_size" in weights else "channel", **weights}
    return Compressed.of({"format": form, "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}})


def of_module(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    return {f"m.{name}": Resident(tensor) for name, tensor in tensors.items()}


def dequantized(form: Format, tensors: dict[str, Tensor]) -> LazyTensor:
    return form.dequantized(of_module(tensors))["m.weight"]


def by_columns() -> dict[str, Tensor]:
    return {"qzeros": words(COLUMNS // GROUP, ROWS // 8), "scales": scales(COLUMNS // GROUP, ROWS).half()}


def by_groups() -> dict[str, Tensor]:
    return {"weight_packed": words(ROWS, COLUMNS // 8), "weight_scale": scales(ROWS, COLUMNS // GROUP).bfloat16()}


def by_rows(**values: Tensor) -> dict[str, Tensor]:
    return {**values, "weight_scale": scales(ROWS, 1).bfloat16()}


def bytes_of_values() -> Tensor:
    return torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)


def float8_values(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (torch.randn(rows, columns) * 100).clamp(-448, 448).to(dtype)


def by_blocks(block: tuple[int, int] | None, dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Tensor]:
    counts = (1, 1) if block is None else (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    return {"weight": float8_values(ROWS, COLUMNS, dtype), "weight_scale_inv": scales(*counts)}


SETTINGS = {"bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Format, Callable[[], dict[str, Tensor]], type]] = {
    "gptq": (Gptq.of(SETTINGS), lambda: {"qweight": words(COLUMNS // 8, ROWS), **by_columns()}, integers.Int4Cpu),
    "awq": (Awq.of(SETTINGS), lambda: {"qweight": words(COLUMNS, ROWS // 8), **by_columns()}, integers.Int4Cpu),
    "int4": (compressed("pack-quantized", num_bits=4, group_size=GROUP), by_groups, integers.Int4Cpu),
    "int4 with zeros": (
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
        lambda: {**by_groups(), "weight_zero_point": words(ROWS // 8, COLUMNS // GROUP)},
        integers.Int4Cpu,
    ),
    "int8 packed": (
        compressed("pack-quantized", num_bits=8),
        lambda: by_rows(weight_packed=words(ROWS, COLUMNS // 4), weight_shape=torch.tensor([ROWS, COLUMNS])),
        integers.Int8,
    ),
    "int8": (compressed("int-quantized", num_bits=8), lambda: by_rows(weight=bytes_of_values()), integers.Int8),
    "bitsandbytes": (BitsAndBytes.of({}), lambda: {"weight": bytes_of_values(), "SCB": scales(ROWS)}, integers.Int8),
    "fp8 in blocks": (Float8((64, 96)), lambda: by_blocks((64, 96)), float8.Float8Cpu),
    "fp8": (Float8(None), lambda: by_blocks(None), float8.Float8Cpu),
    "fp8 by rows": (
        compressed("float-quantized", type="float"),
        lambda: by_rows(weight=float8_values(ROWS, COLUMNS)),
        float8.Float8Cpu,
    ),
}
"""Name -> format, stored tensors, operator on a CPU."""


def weight_of(name: str) -> LazyTensor:
    form, stored, _ = FORMATS[name]
    return dequantized(form, stored())


def packed(lazy: LazyTensor, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """The weight with its stored tensors, as a load fills it."""
    made = pack(lazy, dtype, torch.device("cpu"))
    assert not made[1]
    return made[0]


def sliced(lazy: LazyTensor, data: st.DataObject) -> LazyTensor:
    """Any slice of a weight, but an empty one."""
    for dim in data.draw(st.sets(st.integers(0, lazy.ndim - 1))):
        lazy = lazy.select(dim, data.draw(ranges(lazy.shape[dim])))
    assume(lazy.numel())
    return lazy


def check_product(lazy: LazyTensor, stored: PackedWeight, kind: type, x: Tensor) -> None:
    """Compare the weight in the layout of the operator `kind` with the values of `lazy`."""
    exact, weight = lazy.materialize().float(), with_products(stored)
    (before,), (after,) = stored.blocks, weight.blocks
    assert isinstance(after.matrix, kind)
    # A scale, a value, their product and the result are rounded to bfloat16, by 2^-8 at most each; sums are in fp32.
    seen, expected = weight.linear(x).float(), linear(x.float(), exact)
    size = linear(x.float().abs(), rounded_sizes(after.matrix, exact))
    assert ((seen - expected).abs() <= 1.01 * 2**-8 * (3 * size + expected.abs())).all()
    assert relative(weight.decoded().float(), exact) < ROUNDING
    check_stored(before, after)


def rounded_sizes(product: Any, exact: Tensor) -> Tensor:
    """At most the sizes of what an operator rounds for the values `exact`.

    A value of 4 bits is `(integer - 8) * scale + value of 8`, the sum of two terms that may be larger than it.
    """
    if not isinstance(product, Int4):
        return exact.abs()
    scales, values_of_8 = product.scales_and_zeros.float().abs().unbind(2)
    return torch.full_like(exact, float((8 * scales + values_of_8).max()))


def check_stored(before: PackedBlock, after: PackedBlock) -> None:
    """A save writes the bits of the file."""
    for name, tensor in before.matrix.decoded.stored.items():
        stored = after.matrix.stored(name)
        assert stored.dtype == tensor.dtype
        if tensor.dtype.is_floating_point and tensor.itemsize == 1:
            assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8)), name
        else:
            assert torch.equal(stored, tensor), name


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=8)
def test_products_of_any_slice(name, data) -> None:
    torch.manual_seed(0)
    lazy = sliced(weight_of(name), data)
    exact = lazy.materialize().float()
    stored = packed(lazy)
    x = torch.randn(data.draw(st.sampled_from([1, 3, 70])), lazy.shape[1]).bfloat16()
    check_product(lazy, stored, FORMATS[name][2], x)
    # Without an operator, a few rows at a time are decoded, with the roundings of `check_product`.
    expected, size = linear(x.float(), exact), linear(x.float().abs(), exact.abs())
    assert ((stored.linear(x).float() - expected).abs() <= 1.01 * 2**-8 * (3 * size + expected.abs())).all()
    assert ((packed(lazy, torch.float32).linear(x.float()) - expected).abs() <= 1e-5 * size).all()


def test_other_dtypes_and_groups_have_no_operator(monkeypatch) -> None:
    lazy = weight_of("gptq")
    assert with_products(packed(lazy, torch.float32)).product == DECODED
    monkeypatch.setattr(integers, "_block_rows", lambda: None)  # as in a torch without the operator
    assert with_products(packed(lazy)).product == DECODED
    monkeypatch.undo()
    incomplete = {"weight_packed": words(16, 8), "weight_scale": scales(16, 1).bfloat16()}
    incomplete["weight_shape"] = torch.tensor([16, 30])  # the last word of a row
    small = {"qweight": words(6, 16), "qzeros": words(3, 2), "scales": scales(3, 16).half()}
    for form, stored in (
        (compressed("pack-quantized", num_bits=8), incomplete),
        (Float8((32, 32)), by_blocks((32, 32))),  # of a few rows
        (Float8(None), by_blocks(None, torch.float8_e5m2)),
        (Gptq.of({"bits": 4, "group_size": 16}), small),
    ):
        assert with_products(packed(dequantized(form, stored))).product == DECODED


def test_a_packed_tensor_computes_as_the_decoded_one() -> None:
    torch.manual_seed(0)
    weight = packed(weight_of("int4"), torch.float32)
    exact, tensor = weight.decoded(), PackedTensor(weight)
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == (exact.shape, exact.dtype, False)
    bias = torch.randn(ROWS)

    def products(w: Tensor, x: Tensor) -> list[Tensor]:
        return [linear(x, w), linear(x, w, bias), x @ w.t(), torch.einsum("...i,oi->...o", x, w), w.float() * 2, w[3:5]]

    for shape in ((COLUMNS,), (3, COLUMNS), (2, 5, COLUMNS)):
        results, grads = [], []
        for w in (tensor, exact):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            results.append(products(w, x))
            sum(result.square().sum() for result in results[-1]).backward()
            grads.append(x.grad)
        for ours, theirs in zip(*results, strict=True):
            assert type(ours) is Tensor
            assert relative(ours, theirs) < 1e-5
        assert relative(*grads) < 1e-5


def mxfp4_experts() -> LazyTensor:
    """(3 experts, 64 in, 40 out), stored as (experts, out, in)."""
    blocks = torch.randint(256, (3, 40, 2, 16), dtype=torch.uint8)
    stored = {"e_blocks": blocks, "e_scales": torch.randint(120, 130, blocks.shape[:-1], dtype=torch.uint8)}
    tensors = {name: Resident(tensor) for name, tensor in stored.items()}
    return Mxfp4.of({}).dequantized(tensors)["e"]


@given(data=st.data())
@settings(max_examples=20)
def test_an_expert_that_is_stored_transposed_is_not_decoded_at_once(data) -> None:
    torch.manual_seed(0)
    lazy = sliced(mxfp4_experts(), data)
    weight = packed(lazy, torch.float32)
    exact, tensor = weight.decoded(), PackedTensor(weight)
    assert torch.equal(exact, lazy.materialize())
    with mock.patch.object(PackedWeight, "decoded", side_effect=AssertionError("decoded at once")):
        for expert in range(lazy.shape[0]):
            for shape in ((), (3,), (2, 3)):
                x = torch.randn(*shape, lazy.shape[1])
                assert relative(x @ tensor[expert], x @ exact[expert]) < 1e-5


def test_named_arguments() -> None:
    weight = packed(weight_of("int4"), torch.float32)
    exact, tensor = weight.decoded(), PackedTensor(weight)
    x, y = torch.randn(3, COLUMNS), torch.randn(2, ROWS)
    assert relative(linear(x, weight=tensor), linear(x, exact)) < 1e-5
    assert relative(linear(input=x, weight=tensor, bias=None), linear(x, exact)) < 1e-5
    assert relative(torch.matmul(input=y, other=tensor), y @ exact) < 1e-5
    out = torch.empty(2, COLUMNS)
    assert torch.matmul(y, tensor, out=out) is out
    assert relative(out, y @ exact) < 1e-5


def test_casts_and_no_tokens() -> None:
    weight = with_products(packed(weight_of("int4")))
    exact, tensor = weight.decoded(), PackedTensor(weight)
    assert linear(torch.ones(0, COLUMNS, dtype=torch.bfloat16), tensor).shape == (0, ROWS)
    x = torch.randn(3, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, tensor), linear(x, exact))
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, tensor)


def test_a_recorded_product_keeps_nothing_decoded() -> None:
    weight, saved = packed(weight_of("int4"), torch.float32), []
    x = torch.randn(3, COLUMNS, requires_grad=True)
    with mock.patch.object(PackedWeight, "decoded", autospec=True, side_effect=PackedWeight.decoded) as decoded:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            y = linear(x, PackedTensor(weight))
        assert not saved
        assert decoded.call_count == 0
        y.sum().backward()
        assert decoded.call_count == 1


def test_float8_with_nan_is_decoded() -> None:
    values = float8_values(96, 64)
    values[3, 5] = torch.nan
    lazy = dequantized(Float8(None), {"weight": values, "weight_scale_inv": scales(1)})
    weight = with_products(packed(lazy))
    assert isinstance(weight.blocks[0].matrix, float8.Float8Cpu)
    y = weight.linear(torch.ones(2, 64).bfloat16())
    assert y.isnan().nonzero().tolist() == [[0, 3], [1, 3]]
