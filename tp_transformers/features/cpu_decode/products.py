"""Products of one bfloat16 row and a matrix on a CPU, by the kernel of torch that reads the matrix at full speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn as onednn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ...strategies.forward.attach import wrap_forward
from ...strategies.forward.communication import Forwarder
from ...torch_api import take

is_amx_supported = take("torch.cpu._is_amx_tile_supported")


def onednn_is_slow() -> bool:
    """True on a CPU where oneDNN multiplies one bfloat16 row at half the speed of torch's own kernel.

    That is so with AVX-512 and without AMX (23 against 11 GB/s a core of the matrix on a Zen 4); without AVX-512, torch
    does not ask oneDNN. With AMX nobody has measured, and oneDNN stays.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_amx_supported()


def choose_kernels(model: nn.Module) -> None:
    """Let linears and experts of `model`, in bfloat16 on a CPU, multiply single rows by torch's own kernel."""
    if onednn_is_slow():
        for module in model.modules():
            if _has_rows_as_outputs(module) and all(_is_bfloat16_on_cpu(param) for param in module.parameters(False)):
                wrap_forward(module, _by_rows)


def _has_rows_as_outputs(module: nn.Module) -> bool:
    """True if each output feature is a row in memory: torch's kernel takes 40 times as long for columns."""
    return isinstance(module, nn.Linear) or getattr(module, "is_transposed", True) is False


def _is_bfloat16_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _by_rows(call: Forwarder) -> Forwarder:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args and isinstance(args[0], Tensor) and not torch.is_grad_enabled() else None
        if x is None or not statically_known_true(x.shape[:-1].numel() == 1) or torch.compiler.is_exporting():
            return call(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            with _Rows():
                return call(module, *args, **kwargs)
        return _without_onednn(call, module, *args, **kwargs)

    return forward


def _without_onednn(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `call`, during which oneDNN is off in all threads, unless it was off before."""
    if not onednn.enabled:
        return call(*args, **kwargs)
    onednn.enabled = False  # type: ignore[assignment]
    try:
        return call(*args, **kwargs)
    finally:
        onednn.enabled = True  # type: ignore[assignment]


class _Rows(TorchFunctionMode):
    """Makes linears of a graph an operator that turns oneDNN off whenever the graph runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autocast and subclasses of tensors (DTensors, quantised weights) do not know the operator.
        is_row = func is linear and not (kwargs or torch.is_autocast_enabled("cpu")) and all(map(_is_plain, args))
        return (_row_linear if is_row else func)(*args, **(kwargs or {}))


def _is_plain(value: Any) -> bool:
    return value is None or (type(value) in (Tensor, nn.Parameter) and _is_bfloat16_on_cpu(value))


_LIBRARY = torch.library.Library("tp_transformers", "FRAGMENT")
_LIBRARY.define("row_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.impl("row_linear", partial(_without_onednn, linear), "CPU")
torch.library.register_fake("tp_transformers::row_linear", linear, lib=_LIBRARY)
_row_linear = torch.ops.tp_transformers.row_linear.default
