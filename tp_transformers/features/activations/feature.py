"""Full activations of sharded models: for hooks, `output_attentions`, and nnsight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...seams import Feature

if TYPE_CHECKING:
    from ...patches import Patch


class Activations(Feature):
    """`tp_transformers.debug.full_activation` and `local_activation`, attentions of all heads, patches of nnsight."""

    public = dict.fromkeys(("debug.full_activation", "debug.local_activation"), ".activations")

    def loaded(self, model: Any) -> None:
        from .activations import return_full_attentions

        return_full_attentions(model, model.tp_resolution.attention, model.tp_group)

    def clients(self) -> Sequence[Patch]:
        from .patch import ANY_RANKS, FULL_ACTIVATIONS

        return ANY_RANKS, FULL_ACTIVATIONS  # a model may be loaded after nnsight has made its tree

    def model_patches(self) -> Sequence[Patch]:
        from .patch import FULL_ACTIVATIONS

        return (FULL_ACTIVATIONS,)


FEATURE = Activations()
