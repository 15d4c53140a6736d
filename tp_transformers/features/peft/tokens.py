"""PEFT's trainable tokens on a sharded embedding or head: each rank puts in the rows that it has.

LoraConfig(..., trainable_token_indices=[7, 9])      rows 7 and 9, replicated; their gradients are summed
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...strategies import ParamShard, local_tensor, take
from .layers import PeftLayer, parameters_as


class AdaptedTokens(PeftLayer):
    """A TrainableTokensLayer of PEFT on a sharded base layer."""

    tp_rows: dict[str, tuple[Tensor, Tensor]]
    """Adapter -> positions of its tokens in this rank's rows, and in its `token_indices`; others are other ranks'."""

    def get_merged_weights(self, active_adapters: list[str]) -> Tensor:
        """This rank's weight with the rows of the adapters."""
        param = self.base_layer._parameters["weight"]
        weight: Tensor = self.base_layer.tp_shards["weight"].view(param)
        for adapter in active_adapters:
            owner = self.trainable_tokens_delta
            weight = self._put(weight, adapter, owner.tp_shards[adapter].view(owner._parameters[adapter]))
        return weight

    def forward_adapters(self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any) -> Any:
        """The forward of the base layer, with its communication, on `get_merged_weights`."""
        if self.disable_adapters or not active_adapters or self.merged:
            return super().forward_adapters(x, active_adapters, *args, **kwargs)
        self._check_overlapping_tokens(active_adapters)
        with parameters_as((self.base_layer, {"weight": self.get_merged_weights(active_adapters)})):
            return self.base_layer(x, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the rows into this rank's weight; `safe_merge` raises ValueError for values that are not finite."""
        from peft.tuners.tuners_utils import check_adapters_to_merge

        names = check_adapters_to_merge(self, adapter_names)
        self._check_overlapping_tokens(names)
        for name in names:
            rows = self.trainable_tokens_delta._parameters[name]
            if safe_merge and not torch.isfinite(rows).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            self._overwrite(name, rows)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Put the original rows into this rank's weight."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            self._overwrite(name, self.trainable_tokens_original[name])

    def _overwrite(self, adapter: str, rows: Tensor) -> None:
        param = self.base_layer._parameters["weight"]
        weight = local_tensor(param)
        with torch.no_grad():
            weight.copy_(self._put(weight, adapter, rows))

    def _put(self, weight: Tensor, adapter: str, rows: Tensor) -> Tensor:
        """`weight: (rows/size, features)` or `(rows, features/size)` with full rows of the adapter's tokens."""
        shard: ParamShard = self.base_layer.tp_shards["weight"]
        if shard.layout is not None and shard.layout.dim == 1:
            rows = take(rows, shard.layout, shard.group.rank)
        positions, numbers = self.tp_rows[adapter]
        return weight.index_copy(0, positions, rows.to(weight)[numbers])
