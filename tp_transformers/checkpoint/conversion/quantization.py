"""Quantised checkpoints: which of them can be loaded, and what their tensors are in floating point.

Those in float8 with a scale a block (DeepSeek-V3, Qwen3-FP8, ...) or a tensor are dequantised while they are loaded:
every weight is an expression over its values and its scales, so that a rank reads what its slice takes of both. All
others are refused, by name and before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedError
from ...slices.composed import Stack
from ...slices.lazy import LazyTensor
from ...slices.scaled import Scaled

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE, _ACTIVATION_SCALE = "_scale_inv", ".activation_scale"


@dataclass(frozen=True)
class Float8:
    """How the weights of a checkpoint are quantised: `name` in float8, its scales in `name` + "_scale_inv"."""

    block: tuple[int, int] | None
    """Rows and columns that share one scale; None for one scale a weight."""

    def dequantized(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The checkpoint's tensors without quantisation; tensors without a scale stay as they are.

        Raises CheckpointError where a weight in float8 has no scale, or scales do not fit their weight.
        """
        result = {
            name: self._product(name, tensor, tensors[name + _SCALE]) if name + _SCALE in tensors else tensor
            for name, tensor in tensors.items()
            if not self._is_consumed(name, tensors)
        }
        for name, tensor in result.items():
            if tensor.dtype in _FLOAT8:
                raise _unfit(name, f"{tensor.dtype} without {name + _SCALE}", "a scale for each of its blocks")
        return result

    def _is_consumed(self, name: str, tensors: Mapping[str, LazyTensor]) -> bool:
        """True for a scale of another tensor, also of activations, which stay in floating point."""
        if name.endswith(_ACTIVATION_SCALE):
            return name.removesuffix(_ACTIVATION_SCALE) + ".weight" + _SCALE in tensors
        return name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors

    def _product(self, name: str, values: LazyTensor, scales: LazyTensor) -> Scaled:
        if values.dtype not in _FLOAT8 or values.ndim < 2:
            got = f"{values.dtype} of shape {tuple(values.shape)} with scales"
            raise _unfit(name, got, "a matrix of float8_e4m3fn or float8_e5m2")
        if not scales.dtype.is_floating_point:
            raise _unfit(name, f"scales in {scales.dtype}", "scales in floating point")
        block = (*(1,) * (values.ndim - 2), *(self.block or values.shape[-2:]))
        if scales.numel() == 1:  # for all there is, whatever the config says of the others
            block = tuple(values.shape)
        while scales.ndim < values.ndim:
            scales = Stack([scales], 0)
        try:
            return Scaled(values, scales, block)
        except ValueError as error:
            raise _unfit(name, str(error), "one scale a block") from None


def take_quantization(config: Any, asked: Any) -> Float8 | None:
    """Take what a model's `config` says of quantisation out of it; None where its checkpoint is not quantised.

    `asked` is the `quantization_config` that the caller gave `from_pretrained`.

    Raises UnsupportedError on a quantisation that is not `Float8`, and on `asked` that wants anything but to undo it.
    """
    found = None
    for each in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))):
        found = found or _settings(getattr(each, "quantization_config", None))
        if "quantization_config" in vars(each or object):
            del each.quantization_config
    wanted = _settings(asked)
    method = _method(found)
    if wanted and not (method == _method(wanted) == "fp8" and wanted.get("dequantize")):
        raise UnsupportedError(
            "from_pretrained",
            got=f"tp_plan with quantization_config for {_method(wanted)}",
            expected="weights in floating point",
            fix="Leave out quantization_config: with tp_plan weights in FP8 are dequantised, and none quantised.",
        )
    if not found:
        return None
    if method != "fp8" or found.get("expert_dtype", "fp8") != "fp8":
        what = method if method != "fp8" else f"fp8 and experts in {found['expert_dtype']}"
        fix = "Choose such a checkpoint of the model, or load this one without tp_plan."
        if method == "mxfp4":
            undone = "from_pretrained(name, quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(folder)"
            fix = f"Dequantise it once, in one process: {undone}."
        raise UnsupportedError(
            "tp_plan",
            got=f"a checkpoint quantised with {what}",
            expected="one in floating point, or in FP8 with a scale a block",
            fix=fix,
        )
    block = found.get("weight_block_size")
    return Float8(None if block is None else (int(block[0]), int(block[1])))


def _settings(quantization: Any) -> dict[str, Any]:
    """A quantization_config, which may be a dict, an object of transformers or None, as a dict."""
    if quantization is None or isinstance(quantization, dict):
        return quantization or {}
    return dict(quantization.to_dict())


def _method(settings: Mapping[str, Any] | None) -> str:
    """The method's name in messages: gptq, awq, ..."""
    if not settings:
        return "nothing"
    bits = next((f"bitsandbytes ({name[8:]})" for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)), None)
    method = settings.get("quant_method")
    return bits or str(getattr(method, "value", method))


def _unfit(name: str, got: str, expected: str) -> CheckpointError:
    fix = "Download the checkpoint again; if it is whole, its config's quantization_config does not describe it."
    return CheckpointError(f"tensor {name}", got=got, expected=expected, fix=fix)
