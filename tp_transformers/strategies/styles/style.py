"""The base class of other libraries' styles, which cut their module and communicate by themselves."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Placement, Shard

from ...slices.layout import Split, chunked
from ..base import TensorParallelLayer


class StyleParallel(TensorParallelLayer):
    """A style of another library: it computes with DTensors, which are cut as torch.chunk cuts them."""

    cuts_as_torch = True
    owner = ""
    """The library's name in messages: "torch's"."""
    style: Any

    @property
    def shown(self) -> str:
        """The style in messages."""
        return f"{self.owner} {type(self.style).__name__}"

    @property
    def leaves_replicated_output(self) -> bool:
        """False: a style may say how an output arrives, and leave it otherwise."""
        return False

    def _cut(self, length: int, size: int, unit: int) -> Split:
        split = chunked(length, size)
        if self.split is not None:
            heads = super()._cut(length, size, unit)
            if length % size or not heads.is_chunked:
                raise ValueError(
                    f"{self.shown} does not know of its {self.split.length} heads, and cannot cut them for {size} "
                    'ranks; use the strategies colwise and rowwise by name, or tp_plan="auto"'
                )
        return split


def is_features(placement: Placement | None) -> bool:
    """True if the last dim of (batch, sequence, features) is cut."""
    return isinstance(placement, Shard) and placement.dim in (-1, 2)
