"""Uploads of a model to the Hub: `push_to_hub`, and `save_pretrained(folder, push_to_hub=True)`."""

from __future__ import annotations

from collections.abc import Sequence

from ...seams import Feature


class Push(Feature):
    """All ranks save, and rank 0 uploads."""

    def model_methods(self) -> Sequence[type]:
        from .push import PushedModel

        return (PushedModel,)


FEATURE = Push()
