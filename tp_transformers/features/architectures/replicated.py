"""Modules that every rank computes in full, with outputs that this rank's heads use, or that the ranks sum."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import copy_to_region
from ...strategies.base import TensorParallelLayer
from ...strategies.linear import LAST
from ...strategies.replicate import ReplicateParallel
from ...strategies.signature import LOCAL, REPLICATED, Signature


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


class MlaKvAProjParallel(TensorParallelLayer):
    """The replicated projection of multi-head latent attention to (latent, rotary key).

    A column-parallel layer takes the latent and sums its gradient. This rank's heads take the rotary key directly, so
    its gradient is summed here (backward: all-reduce).
    """

    signature = Signature(REPLICATED, LOCAL)

    def check(self, module: nn.Module) -> None:
        """The config must have the width of the rotary key."""
        if not isinstance(getattr(self.config, "qk_rope_head_dim", None), int):
            raise ValueError(
                f"the config has no qk_rope_head_dim, the width of the rotary key that {self.name} ends with"
            )

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B's output ends with a delta of the rotary key, handled the same way."""
        return ReplicateParallel(), copy.copy(self)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if not torch.is_grad_enabled():
            return outputs
        rope = self.config.qk_rope_head_dim
        latent, key = outputs.split([outputs.shape[LAST] - rope, rope], LAST)
        return torch.cat([latent, copy_to_region(key, mesh.get_group())], LAST)


class InnerReplicateParallel(ReplicateParallel):
    """`replicate` for an output that each rank uses for its own heads or features, such as trained rotary positions.

    The gradient of the output is summed (backward: all-reduce).

        x ── A ── xA ──f──
    """

    signature = Signature(REPLICATED, LOCAL)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: B's output is used by this rank's heads, too."""
        return ReplicateParallel(), InnerReplicateParallel()

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return copy_to_region(super().after(module, outputs, mesh), mesh.get_group())


class ReplicateOnceParallel(ReplicateParallel):
    """Every rank holds the full parameter, but only rank 0 adds it to outputs that are summed over the ranks, such as
    the bias of a layer of experts (backward: all-reduce).

        xA + b
        xB
    """

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: not supported."""
        raise NotImplementedError

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        bound.added_once = tuple(name for name, _ in module.named_parameters(recurse=False))
        return bound


class IdentityExpertParallel(TensorParallelLayer):
    """An expert that returns its input, divided by the number of ranks because their outputs are summed."""

    def applies_to(self, module: object) -> bool:
        """See `TensorParallelLayer.applies_to`: the expert is an `nn.Identity`."""
        return True

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        return (inputs[0] / mesh.size(), *inputs[1:])
