"""Full activations of sharded models: for hooks, `output_attentions`, and nnsight."""

from __future__ import annotations

from typing import Any

from ...seams import Feature


class Activations(Feature):
    """`tp_transformers.debug.full_activation` and `local_activation`, attentions of all heads, patches of nnsight."""

    public = dict.fromkeys(("debug.full_activation", "debug.local_activation"), ".activations")
    clients = (".patch.ANY_RANKS", ".patch.FULL_ACTIVATIONS")  # a model may be loaded after nnsight has made its tree
    model_patches = (".patch.FULL_ACTIVATIONS",)

    def loaded(self, model: Any) -> None:
        from .activations import return_full_attentions

        return_full_attentions(model, model.tp_resolution.attention, model.tp_group)


FEATURE = Activations()
