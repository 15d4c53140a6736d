"""LoRA on a sharded base layer, with DoRA, LoRA on parameters and AdaLoRA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...marks import untyped
from ...ranks import direct
from ...strategies import SHARD, STRATEGY, ParamShard, local_tensor, take
from .layers import (
    AdaptedFactors,
    AdaptedLayer,
    PeftLayer,
    communicating,
    local_weights,
    parameters_as,
    product,
)


class AdaptedLora(AdaptedLayer):
    """A LoRA layer; its matrices are modules with strategies, those of an embedding are parameters."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weight."""
        with local_weights(self):
            delta: Tensor = super().get_delta_weight(adapter)
        shard = SHARD.of(untyped(self.get_base_layer()).weight)
        # Adapters of embeddings are full along the hidden size.
        return take(delta, shard.layout, shard.group.rank) if delta.shape == shard.shape else delta

    def _embed(self, ids: Tensor, weight: Tensor, *functions: Any, **named: Any) -> Tensor:
        """Look up this rank's rows of an adapter, and sum over the ranks; weight: (vocab/size, r)."""
        base = untyped(self.get_base_layer())
        strategy = STRATEGY.find(base)
        if strategy is None or strategy.split_dim("weight", 2) != 0:  # the rows are not sharded
            plain: Tensor = super()._embed(ids, weight, *functions, **named)
            return plain
        local, embed = strategy.local_attributes(base, strategy.rank), super()._embed

        def look_up(own: Tensor) -> Tensor:
            saved = {name: getattr(base, name) for name in local}
            base.__dict__.update(local)
            try:
                return embed(own, weight)  # type: ignore[no-any-return]
            finally:
                base.__dict__.update(saved)

        return communicating(base, ids, look_up)


class AdaptedParam(AdaptedLora):
    """LoRA on a parameter: the weights of all experts (experts, in, out) or (experts, out, in), or one matrix.

    A is (experts * r, in), and B (out, r * experts).
    """

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weights."""
        with local_weights(self):
            return self._delta(adapter)

    def _delta(self, adapter: str) -> Tensor:
        a, b = (
            module[adapter].tp_shards["weight"].view(module[adapter]._parameters["weight"])
            for module in (self.lora_A, self.lora_B)
        )
        param, scaling = self.get_param(), self.scaling[adapter]
        a, b = a.to(param.dtype), b.to(param.dtype)
        if param.ndim == 2:
            return scaling * (b @ a)  # type: ignore[no-any-return]
        a = a.reshape(self.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        shard: ParamShard = self.get_base_layer().tp_shards[self.parameter_name]
        if shard.layout is not None and shard.layout.dim == 0:  # this rank's experts
            a, b = (take(each, shard.layout, shard.group.rank) for each in (a, b))
        delta: Tensor = scaling * (b @ a)
        return delta if self._did_swap_in_out_features else delta.transpose(1, 2)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Replace the parameter by this rank's values with the adapters added, in the block."""
        base, name = self.get_base_layer(), self.parameter_name
        param = base._parameters[name]
        weight = base.tp_shards[name].view(param)
        for adapter in active_adapters:
            if adapter in self.lora_A:
                weight = weight + self._delta(adapter)
        with parameters_as((base, {name: weight})):
            yield


class AdaptedDora(PeftLayer):
    """The magnitudes of DoRA: one for each row of a linear's weight, by which the norm of the row is replaced."""

    peft_class: type
    """Its class in PEFT."""
    tp_shards: dict[str, ParamShard]
    tp_sums: bool
    """True if this rank has columns of the weight: the squares of a row are summed over the ranks."""

    def get_lora_weight(self, **arguments: Any) -> Tensor:
        """LoRA's update of this rank's weight, without a gradient: (out/size, in) or (out, in/size)."""
        a, b = (local_tensor(arguments[name].weight).detach() for name in ("lora_A", "lora_B"))
        return b @ a

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """The norm of each row that this rank has a part of (all-reduce if it has columns): (out/size) or (out)."""
        rows = (local_tensor(weight).T if self.fan_in_fan_out else local_tensor(weight)) + scaling * lora_weight
        if not self.tp_sums:
            norms: Tensor = torch.linalg.norm(rows, dim=1)
            return norms.to(rows.dtype)
        squares = rows.float().square().sum(1)
        direct.all_reduce(squares, self.tp_shards["weight"].group.process_group)
        return squares.sqrt().to(rows.dtype)

    def forward(self, x: Tensor, *, base_layer: Any, base_result: Tensor | None = None, **named: Any) -> Tensor:
        """The update of the base layer's outputs, as PEFT computes it, on this rank's rows or columns."""
        shards, params = base_layer.tp_shards, base_layer._parameters
        local = {name: shards[name].view(param) if name in shards else param for name, param in params.items()}
        if base_result is None:  # of inputs that dropout changed
            base_result = product(base_layer, x)
            if local["bias"] is not None:
                base_result = base_result + local["bias"]  # PEFT subtracts it
        magnitudes = self.tp_shards["weight"].view(self._parameters["weight"])
        with parameters_as((self, {"weight": magnitudes}), (base_layer, local)):
            updates: Tensor = super().forward(x, base_layer=base_layer, base_result=base_result, **named)
        return updates


class AdaptedAdalora(AdaptedFactors):
    """An AdaLoRA layer: between LoRA's matrices a trained value for each of r, E (r, 1)."""

    factor, dropouts = "lora_A", "lora_dropout"

    def matrices(self, adapter: str) -> tuple[Tensor, Tensor, Tensor, Any]:
        a, b, e = self.lora_A[adapter], self.lora_B[adapter], self.lora_E[adapter]
        return a, e.T, b, self.scaling[adapter] / (self.ranknum[adapter] + 1e-5)  # as PEFT has it
