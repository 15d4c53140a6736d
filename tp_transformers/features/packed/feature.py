"""Quantised weights that stay packed in memory: `tp_dequantize=False`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import PlanError
from ...seams import Feature, Option

if TYPE_CHECKING:
    from ...loading.encoding import Encoding
    from ...loading.holding import Holding


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

    def options(self) -> Sequence[Option]:
        return (Dequantize(),)

    def encodings(self) -> Sequence[type[Encoding]]:
        from .arriving import Arriving

        return (Arriving,)

    def holdings(self) -> Sequence[type[Holding]]:
        from .holding import Packing

        return (Packing,)

    def model_methods(self) -> Sequence[type]:
        from .placeholder import PackedModel

        return (PackedModel,)


FEATURE = Packed()
