"""Multi-token prediction: `generate(use_mtp=True)` drafts with sharded layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class MultiTokenPrediction(Feature):
    """The layers that draft tokens are sharded as the model's own layers are."""

    def model_patches(self) -> Sequence[Patch]:
        from .layers import LAYERS

        return (LAYERS,)


FEATURE = MultiTokenPrediction()
