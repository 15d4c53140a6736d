"""Quantised weights that stay packed in memory: `tp_dequantize=False`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import PlanError
from ...seams import RAISES, Feature, Option


class Dequantize(Option):
    """False: a quantised checkpoint stays packed in memory, and is dequantised in each forward. None: True."""

    name = "dequantize"

    def check(self, value: Any, arguments: Mapping[str, Any]) -> None:
        super().check(value, arguments)
        if value is False and arguments.get("quantization_config") is not None:
            fix = "Leave out quantization_config to keep weights packed, or tp_dequantize to undo it."
            got = "both tp_dequantize=False and quantization_config"
            raise PlanError("from_pretrained", got=got, expected="one of them", fix=fix)


class Packed(Feature):
    """Weights are decoded in each forward, or multiplied as they are packed."""

    requires = ("full_parameters", "quantized")
    torch_names = {
        "torch.ops.aten._convert_weight_to_int4pack": "packed weights are decoded in a forward",
        "torch.ops.aten._convert_weight_to_int4pack_for_cpu": "packed weights are decoded in a forward",
        "torch.ops.aten._unsafe_view": RAISES,
        "torch.ops.aten._weight_int4pack_mm": "packed weights are decoded in a forward",
        "torch.ops.aten._weight_int4pack_mm_for_cpu": "packed weights are decoded in a forward",
        "torch.ops.aten._weight_int8pack_mm": "packed weights are decoded in a forward",
    }
    options = (Dequantize(),)
    encodings = (".holding.Arriving",)
    holdings = (".holding.Packing",)
    model_methods = (".placeholder.PackedModel",)


FEATURE = Packed()
