"""Quantised weights that stay packed in memory: `tp_dequantize=False`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import PlanError
from ...seams import RAISES, Feature, Option

if TYPE_CHECKING:
    from ...loading.memory import Holding
    from ...loading.storage import Encoding


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
    torch_names: ClassVar[Mapping[str, str]] = {
        "torch.ops.aten._convert_weight_to_int4pack": "packed weights are decoded in a forward",
        "torch.ops.aten._convert_weight_to_int4pack_for_cpu": "packed weights are decoded in a forward",
        "torch.ops.aten._unsafe_view": RAISES,
        "torch.ops.aten._weight_int4pack_mm": "packed weights are decoded in a forward",
        "torch.ops.aten._weight_int4pack_mm_for_cpu": "packed weights are decoded in a forward",
        "torch.ops.aten._weight_int8pack_mm": "packed weights are decoded in a forward",
    }

    def options(self) -> Sequence[Option]:
        return (Dequantize(),)

    def encodings(self) -> Sequence[type[Encoding]]:
        from .holding import Arriving

        return (Arriving,)

    def holdings(self) -> Sequence[type[Holding]]:
        from .holding import Packing

        return (Packing,)

    def model_methods(self) -> Sequence[type]:
        from .placeholder import PackedModel

        return (PackedModel,)


FEATURE = Packed()
