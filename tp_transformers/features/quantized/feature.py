"""Quantised checkpoints: FP8, MXFP4, GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt, BitNet."""

from __future__ import annotations

from ...seams import Feature


class Quantized(Feature):
    """What the stored tensors of a quantised weight mean."""

    encodings = (".find.Quantization",)


FEATURE = Quantized()
