"""Kinds of PEFT's layers on a sharded base layer: LoHa, LoKr, VeRA and OFT, and the class of each layer of PEFT."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...marks import untyped
from ...slices.layout import Layout
from ...strategies import local_tensor, take
from .layers import AdaptedFactors, AdaptedLayer, communicating, parameters_as, split_of
from .lora import AdaptedAdalora, AdaptedDora, AdaptedLora, AdaptedParam
from .tokens import AdaptedTokens


class AdaptedLoha(AdaptedLayer):
    """A LoHa layer: the Hadamard product of this rank's rows or columns of two low-rank matrices."""

    def get_delta_weight(self, adapter_name: str, **options: Any) -> Tensor:
        """The adapter's update of this rank's weight."""
        base = untyped(self.get_base_layer())
        with parameters_as((base, {"weight": local_tensor(base.weight)})):  # PEFT reads its shape
            delta: Tensor = super().get_delta_weight(adapter_name, **options)
        return delta

    def _get_delta_activations(self, adapter_name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return communicating(self.get_base_layer(), x, partial(super()._get_delta_activations, adapter_name))


class AdaptedLokr(AdaptedLoha):
    """A LoKr layer: this rank's rows or columns of a Kronecker product, which every rank computes in full."""

    def get_delta_weight(self, adapter_name: str, **options: Any) -> Tensor:
        """The adapter's update of this rank's weight."""
        base = untyped(self.get_base_layer())
        shard = base.tp_shards["weight"]
        full = torch.empty(1, dtype=base.weight.dtype, device="meta").expand(shard.shape)
        with parameters_as((base, {"weight": full})):
            delta: Tensor = super(AdaptedLoha, self).get_delta_weight(adapter_name, **options)
        own = take(delta, shard.layout, shard.group.rank)
        return own.contiguous()  # a view would keep the product until the backward


class AdaptedVera(AdaptedFactors):
    """A VeRA layer: two frozen random matrices, A (r, in) and B (out, r), between trained vectors of r and out."""

    factor, dropouts = "vera_lambda_d", "vera_dropout"

    def matrices(self, adapter: str) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `AdaptedFactors.matrices`; PEFT's are as large as the largest layer needs."""
        base = self.get_base_layer()
        a, b = self.vera_A[adapter][:, : self.in_features], self.vera_B[adapter][: self.out_features]
        split, is_input = split_of(base)
        if split is not None and is_input:
            a = take(a, Layout(1, split), base.tp_shards["weight"].group.rank)
        elif split is not None:
            b = take(b, Layout(0, split), base.tp_shards["weight"].group.rank)
        return a, self.vera_lambda_d[adapter], b, self.vera_lambda_b[adapter]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weight."""
        a, inner, b, outer = self.matrices(adapter)
        update: Tensor = (outer[:, None] * b) @ (inner[:, None] * a)
        return update.T if self.fan_in_fan_out else update


class AdaptedOft(AdaptedLayer):
    """An OFT layer, which rotates blocks of inputs: all of them, or those of this rank before a row-parallel linear."""

    reads_parameters_of = nn.Module


_MIXINS: dict[str, type] = {
    "lora_E": AdaptedAdalora,
    "lora_A": AdaptedLora,
    "oft_R": AdaptedOft,
    "hada_w1_a": AdaptedLoha,
    "lokr_w1": AdaptedLokr,
    "vera_lambda_d": AdaptedVera,
    "trainable_tokens_delta": AdaptedTokens,
}
"""Parameters of a layer of PEFT -> its mixin, the first that fits; others have AdaptedLayer."""


@cache
def adapted_class(cls: type) -> type:
    """The subclass of the class of PEFT's layer with the mixin for it; for DoRA's magnitudes, AdaptedDora."""
    if issubclass(cls, AdaptedLayer | AdaptedDora | AdaptedTokens):
        return cls
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "peft_class": cls}
    parameters = getattr(cls, "adapter_layer_names", None)
    if parameters is None:
        mixin: type = AdaptedDora
    elif hasattr(cls, "get_param"):
        mixin = AdaptedParam
    else:
        mixin = next((mixin for name, mixin in _MIXINS.items() if name in parameters), AdaptedLayer)
    return type(cls.__name__, (mixin, cls), names)
