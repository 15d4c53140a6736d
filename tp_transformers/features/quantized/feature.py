"""Quantised checkpoints: FP8, MXFP4, GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt, BitNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...loading.storage import Encoding


class Quantized(Feature):
    """What the stored tensors of a quantised weight mean."""

    def encodings(self) -> Sequence[type[Encoding]]:
        from .find import Quantization

        return (Quantization,)


FEATURE = Quantized()
