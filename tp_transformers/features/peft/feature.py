"""Adapters of PEFT on a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Adapters(Feature):
    """PEFT around a loaded model, and the methods of transformers that load and save an adapter."""

    requires: ClassVar[tuple[str, ...]] = ("full_parameters", "hub_streaming")

    def model_methods(self) -> Sequence[type]:
        from .files import AdaptedModel

        return (AdaptedModel,)

    def model_patches(self) -> Sequence[Patch]:
        from .files import HOT_SWAPS
        from .inject import WATCH_ADAPTERS

        return (WATCH_ADAPTERS, HOT_SWAPS)


FEATURE = Adapters()
