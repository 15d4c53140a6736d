"""Which kernel multiplies a bfloat16 row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

from tp_transformers.features.cpu_decode import products


class Seen(nn.Linear):
    """Notes whether oneDNN is on during its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.onednn = torch._C._get_mkldnn_enabled()
        return super().forward(x)


class ByKeyword(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input=x, weight=self.weight, bias=self.bias)


class Doubled(torch.Tensor):
    """A weight of another library, which computes linears itself."""

    def detach(self) -> Any:
        return super().detach().as_subclass(Doubled)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                args = (args[0] * 2, *args[1:])
            return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    """Merged experts, as transformers marks them: `is_transposed` if inputs are rows in memory."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(2, 4, 4, dtype=torch.bfloat16))
        self.is_transposed = is_transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.onednn = torch._C._get_mkldnn_enabled()
        return x @ self.down_proj[0]


@pytest.fixture(autouse=True)
def slow_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_slow", lambda: True)
    torch._dynamo.reset()  # all linears have one forward, which would reach the limit of its graphs


def chosen(module: Any) -> Any:
    products.choose_kernels(nn.Sequential(module))
    return module


@pytest.mark.parametrize(
    ("dtype", "shape", "grad", "onednn"),
    [
        (torch.bfloat16, (1, 1, 64), False, False),
        (torch.bfloat16, (64,), False, False),
        (torch.bfloat16, (1, 2, 64), False, True),
        (torch.bfloat16, (2, 1, 64), False, True),
        (torch.bfloat16, (1, 1, 64), True, True),
        (torch.float32, (1, 1, 64), False, True),
    ],
)
def test_one_bfloat16_row_without_gradients_is_multiplied_by_torch(
    dtype: torch.dtype, shape: tuple[int, ...], grad: bool, onednn: bool
) -> None:
    linear, x = chosen(Seen(64, 96, dtype=dtype)), torch.randn(shape, dtype=dtype)
    with torch.set_grad_enabled(grad):
        output = linear(x)
    assert linear.onednn is onednn
    assert torch._C._get_mkldnn_enabled()
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(output.double(), exact, atol=1e-2, rtol=1e-2)


def test_onednn_is_on_again_after_an_error_and_stays_off_for_who_turned_it_off() -> None:
    linear = chosen(Seen(64, 96, dtype=torch.bfloat16))
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear(torch.randn(1, 63, dtype=torch.bfloat16))
    assert torch._C._get_mkldnn_enabled()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        linear(torch.randn(1, 64, dtype=torch.bfloat16))
        assert not torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_whose_outputs_are_columns_keep_onednn(is_transposed: bool) -> None:
    experts = chosen(Experts(is_transposed))
    with torch.no_grad():
        experts(torch.ones(1, 4, dtype=torch.bfloat16))
    assert experts.onednn is is_transposed


@pytest.mark.parametrize(
    ("dtype", "shape", "grad", "is_row"),
    [
        (torch.bfloat16, (1, 1, 64), False, True),
        (torch.bfloat16, (64,), False, True),
        (torch.bfloat16, (1, 2, 64), False, False),
        (torch.bfloat16, (1, 1, 64), True, False),
        (torch.float32, (1, 1, 64), False, False),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_is_one_operator_of_a_graph(
    dtype: torch.dtype, shape: tuple[int, ...], grad: bool, is_row: bool, bias: bool
) -> None:
    linear, x = chosen(nn.Linear(64, 96, bias=bias, dtype=dtype)), torch.randn(shape, dtype=dtype)
    backend = EagerAndRecordGraphs()
    with torch.set_grad_enabled(grad):
        output = torch.compile(linear, backend=backend, fullgraph=True)(x)
    (graph,) = backend.graphs
    (product,) = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert product is (torch.ops.tp_transformers.row_linear.default if is_row else nn.functional.linear)
    exact = nn.functional.linear(*(each if each is None else each.double() for each in (x, linear.weight, linear.bias)))
    torch.testing.assert_close(output.double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_fulfils_what_torch_asks_of_operators(bias: bool) -> None:
    arguments = [torch.randn(shape).bfloat16() for shape in ((1, 1, 64), (96, 64), (96,))[: 2 + bias]]
    torch.library.opcheck(torch.ops.tp_transformers.row_linear.default, arguments)


def test_a_number_of_rows_that_depends_on_data_is_traced() -> None:
    linear, x = chosen(nn.Linear(64, 96, dtype=torch.bfloat16)), torch.randn(3, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda mask: linear(x[mask.nonzero()[:, 0]]), backend="eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert compiled(torch.tensor([1, 0, 1])).shape == (2, 96)


@pytest.mark.parametrize("what", ["keywords", "another library", "autocast"])
def test_other_linears_are_compiled_as_they_are(what) -> None:
    linear = chosen((ByKeyword if what == "keywords" else nn.Linear)(64, 96, dtype=torch.bfloat16))
    if what == "another library":
        linear.weight = nn.Parameter(Doubled(linear.weight.detach()), requires_grad=False)
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=what == "autocast"):
        compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, linear(x))


def test_graphs_for_other_programs_have_operators_of_torch_alone() -> None:
    linear, x = chosen(nn.Linear(64, 96, dtype=torch.bfloat16)), torch.randn(1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for strict in (False, True):
            nodes = torch.export.export(linear, (x,), strict=strict).graph.nodes
            assert [node.target for node in nodes if node.op == "call_function"] == [torch.ops.aten.linear.default]
        torch.testing.assert_close(torch.jit.trace(linear, x)(x), linear(x))
