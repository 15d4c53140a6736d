"""Products of one bfloat16 row and a matrix on a CPU, by the kernel of torch that reads the matrix at full speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn as onednn

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
                module.register_forward_pre_hook(_before)
                module.register_forward_hook(_after, always_call=True)


def _has_rows_as_outputs(module: nn.Module) -> bool:
    """True if each output feature is a row in memory: torch's kernel takes 40 times as long for columns."""
    return isinstance(module, nn.Linear) or getattr(module, "is_transposed", True) is False


def _is_bfloat16_on_cpu(param: Tensor) -> bool:
    return param.dtype == torch.bfloat16 and param.device.type == "cpu"


def _before(module: Any, inputs: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not inputs:
        return
    x = inputs[0]
    if isinstance(x, Tensor) and x.numel() == x.shape[-1:].numel() and onednn.enabled:
        onednn.enabled = False  # type: ignore[assignment]
        module.__dict__["tp_without_onednn"] = True  # nn.Module takes longer to set it


def _after(module: Any, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and module.__dict__.pop("tp_without_onednn", False):
        onednn.enabled = True  # type: ignore[assignment]
