"""Multi-token prediction: `generate(use_mtp=True)` drafts with sharded layers."""

from __future__ import annotations

from ...seams import Feature


class MultiTokenPrediction(Feature):
    """The layers that draft tokens are sharded as the model's own layers are."""

    model_patches = (".layers.LAYERS",)


FEATURE = MultiTokenPrediction()
