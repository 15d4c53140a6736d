"""Position biases (ALiBi): each rank takes the biases of its own heads."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...strategies.base import TensorParallelLayer


class AlibiParallel(TensorParallelLayer):
    """Slice the biases of all heads (ALiBi) that attention gets to this rank's heads.

    The keyword arguments are `alibi` and `position_bias`, (batch * heads, 1, keys) or (batch, heads, 1, keys), and
    `attention_mask`, (batch, heads, queries, keys) if the biases are added to it already. MPT's have no batch dim.
    """

    def check(self, module: nn.Module) -> None:
        """Reject attention that multiplies with slices of its output projection's weight."""
        if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
            raise ValueError("slow_but_exact multiplies by slices of the full weight; set it to False in the config")

    def prepare_arguments(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The biases and `attention_mask` of this rank's heads."""
        if self.split is None:
            return args, keywords
        (start, stop), heads = self.split.ranges[self.rank][0], self.split.length
        mask = keywords.get("attention_mask")
        local = {}
        for name in ("alibi", "position_bias"):
            biases = keywords.get(name)
            if biases is not None and biases.ndim == 3:
                local[name] = biases.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)
            elif biases is not None:
                local[name] = biases[:, start:stop]
        if mask is not None and mask.ndim == 4 and mask.shape[1] == heads:
            local["attention_mask"] = mask[:, start:stop]
        return args, {**keywords, **local}
