"""Methods of a loaded model that count packed weights."""

from __future__ import annotations

from typing import Any

from .weight import packed_weights

_Model: Any = object


class PackedModel(_Model):
    """See `Feature.model_methods`."""

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of this rank's parameters and buffers, packed weights in their layouts."""
        packed = sum(weight.nbytes for weight in packed_weights(self).values())
        return packed + int(super().get_memory_footprint(return_buffers))
