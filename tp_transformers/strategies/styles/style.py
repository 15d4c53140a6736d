"""Base class of adapters for styles of other libraries, which shard and communicate by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...ranks.group import TensorParallelGroup
from ...slices.layout import Ranks, Split, chunked, count_of
from ..base import TensorParallelLayer
from ..shards.shard import ParamShard
from ..signature import ANY, FEATURES


class StyleParallel(TensorParallelLayer):
    """A style of another library: it computes with DTensors, sharded as `torch.chunk` splits."""

    shards_as_torch = True
    owner = ""
    """The library's name in messages: "torch's"."""
    style: Any

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; ids, the input of an embedding, have no features."""
        bound = super().bind(module, size, **options)
        bound.signature = self.signature  # which the adapter has completed in its own way
        if bound.is_embedding and bound.signature.takes is FEATURES:
            bound.signature = replace(bound.signature, takes=ANY)
        return bound

    @property
    def shown(self) -> str:
        """Name of the style in messages."""
        return f"{self.owner} {type(self.style).__name__}"

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """See `TensorParallelLayer.shard`: a DTensor, also for a replicated parameter."""
        return replace(super().shard(param_type, shape, group), use_dtensor=self.use_dtensor)

    def _split_length(self, length: int, ranks: Ranks, unit: int) -> Split:
        size = count_of(ranks)
        if ranks != size:
            raise ValueError(f"{self.shown} splits evenly, not by shares; use strategies by name, such as colwise")
        split = chunked(length, size)
        if self.split is not None:
            heads = super()._split_length(length, size, unit)
            if length % size or not heads.is_chunked:
                raise ValueError(
                    f"{self.shown} does not know of its {self.split.length} heads, and cannot split them for {size} "
                    'ranks; use the strategies colwise and rowwise by name, or tp_plan="auto"'
                )
        return split
