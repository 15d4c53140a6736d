"""Adapters of PEFT on a tensor-parallel model."""

from __future__ import annotations

from ...seams import Feature


class Adapters(Feature):
    """PEFT around a loaded model, and the methods of transformers that load and save an adapter."""

    requires = ("full_parameters", "hub_streaming")
    model_methods = (".files.AdaptedModel",)
    model_patches = (".inject.WATCH_ADAPTERS", ".files.HOT_SWAPS")


FEATURE = Adapters()
