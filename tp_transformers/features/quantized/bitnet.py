"""BitNet b1.58: weights of -1, 0 and 1 with a scale, packed four in a byte, or rounded in every forward.

offline  X.weight (out / 4, in) uint8: byte row i has the rows i, i + out / 4, ... of the weight in two bits each
         X.weight_scale (1): factor of the outputs of an `autobitlinear`, divisor of those of a `bitlinear`
online   X.weight (out, in) in floating point, rounded by the mean of its absolute values

Every rank reads complete weights, a weight at a time: a scale depends on all of its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from ...slices.lazy import Deferred, LazyTensor
from ...transformers_api import should_convert_module
from .format import Format, Locate, Tensors, inconsistent, unsupported

_VALUES = 4
"""Values of a byte."""


@dataclass(frozen=True)
class BitNet(Format):
    """Weights of linears; activations stay in floating point."""

    title = "BitNet"
    is_packable = is_written = False

    is_online: bool
    divides: bool
    """True if a stored scale is a divisor."""
    kept: Collection[str] | None
    """Patterns of modules that are not quantised; None for the output head and tied ones."""
    locate: Locate | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> BitNet:
        kind = settings.get("linear_class") or "bitlinear"
        if settings.get("use_rms_norm"):
            raise unsupported(f"BitNet with a norm in every {kind}", "one without such norms")
        is_online = kind == "autobitlinear" and settings.get("quantization_mode") == "online"
        return cls(is_online, kind == "bitlinear", settings.get("modules_to_not_convert"))

    def located(self, model: PreTrainedModel, locate: Locate) -> BitNet:
        return replace(self, locate=locate, kept=get_keys_to_not_convert(model) if self.kept is None else self.kept)

    def dequantized(self, tensors: Tensors) -> dict[str, LazyTensor]:
        result: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and tensor.ndim == 2 and self._is_quantised(module):
                scale = tensors.get(f"{name}_scale")
                if tensor.dtype == torch.uint8 and (self.is_online or (self.divides and scale is None)):
                    raise inconsistent(name, "packed values", "a weight_scale and quantization_mode: offline")
                shape = (len(tensor) * (_VALUES if tensor.dtype == torch.uint8 else 1), tensor.shape[1])
                decode = partial(self._decode, tensor, scale)
                result[name] = Deferred(decode, shape=shape, dtype=torch.float32)
            elif not (kind == "weight_scale" and f"{module}.weight" in tensors and self._is_quantised(module)):
                result[name] = tensor
        return result

    def _is_quantised(self, module: str) -> bool:
        name, owner = (module, None) if self.locate is None else self.locate(module)
        return isinstance(owner, nn.Linear) and should_convert_module(name, self.kept)

    def _decode(self, weight: LazyTensor, scale: LazyTensor | None) -> torch.Tensor:
        """Decode in float32."""
        stored = weight.materialize()
        if self.is_online:
            values = stored.float()
            factor = 1.0 / values.abs().mean().clamp_(min=1e-5)
            return values.mul_(factor).round_().clamp_(-1, 1).div_(factor)
        if stored.dtype == torch.uint8:
            stored = torch.cat([(stored >> 2 * place & 3).float() - 1 for place in range(_VALUES)])
        factor = torch.ones(()) if scale is None else scale.materialize().float()
        return stored.float() / factor if self.divides else stored.float() * factor
