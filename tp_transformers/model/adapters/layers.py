"""Layers of PEFT on a sharded base layer: they merge, unmerge and compute on this rank's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout

from ...checkpoint.quantization.packed import check_not_packed
from ...errors import UnsupportedError
from ...marks import untyped
from ...slices.layout import Layout, Split
from ...strategies import SHARD, STRATEGY, local_tensor, open_forward, take

_Layer: Any = object
"""Base of the mixins; in the class of a layer, a layer of PEFT follows them in the MRO."""


class AdaptedLayer(_Layer):
    """A layer of PEFT on a sharded base layer."""

    peft_class: type
    """Its class in PEFT."""

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Raise UnsupportedError: PEFT's conversion, which calls this first, would take the SVD of a rank's shard."""
        raise UnsupportedError(
            "convert_to_lora on a tensor-parallel model",
            got=f"the adapter {adapter_name!r}, of which each rank holds a shard",
            expected="complete matrices",
            fix="Call save_pretrained on all ranks, and convert that adapter in one process.",
        )

    def owners(self) -> tuple[nn.Module, ...]:
        """The modules that hold its adapters' parameters."""
        dicts = [getattr(self, name) for name in self.adapter_layer_names]
        return tuple(
            owner for each in dicts for owner in (each.values() if isinstance(each, nn.ModuleDict) else [each])
        )

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Add the adapters to this rank's weight. Raises UnsupportedError if it is packed."""
        check_not_packed(untyped(self.get_base_layer()), "merged adapters")
        with _local_weights(self):
            super().merge(*args, **kwargs)

    def unmerge(self) -> None:
        """Subtract the adapters from this rank's weight."""
        with _local_weights(self):
            super().unmerge()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the layer's own class, on this rank's shards of parameters that are not a module's weight."""
        owners: list[Any] = [own for own in self.owners() if isinstance(own, nn.ParameterDict) and own._parameters]
        if not owners:
            return super().forward(*args, **kwargs)
        saved = [dict(owner._parameters) for owner in owners]
        try:
            for owner in owners:
                for name, param in owner._parameters.items():  # FSDP's parameters have no shard
                    owner._parameters[name] = owner.tp_shards[name].view(param)
            return super().forward(*args, **kwargs)
        finally:
            for owner, params in zip(owners, saved, strict=True):
                owner._parameters.update(params)


class AdaptedLora(AdaptedLayer):
    """A LoRA layer; its matrices are modules with strategies, those of an embedding are parameters."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weight."""
        with _local_weights(self):
            delta: Tensor = super().get_delta_weight(adapter)
        shard = SHARD.of(untyped(self.get_base_layer()).weight)
        # Adapters of embeddings are full along the hidden size.
        own: Tensor = untyped(take(delta, shard.layout, shard.group.rank) if delta.shape == shard.shape else delta)
        return own

    def _embed(self, ids: Tensor, weight: Tensor, *functions: Any, **named: Any) -> Tensor:
        """Look up this rank's rows of an adapter, and sum over the ranks; weight: (vocab/size, r)."""
        base = untyped(self.get_base_layer())
        strategy = STRATEGY.find(base)
        if strategy is None or strategy.split_dim("weight", 2) != 0:  # the rows are not sharded
            plain: Tensor = super()._embed(ids, weight, *functions, **named)
            return plain
        mesh = next(iter(self.lora_embedding_A.tp_shards.values())).group.device_mesh
        with open_forward(base):
            (ids,) = strategy.before(base, (ids,), mesh)
            local = strategy.local_attributes(base, mesh.get_local_rank())
            saved = {name: getattr(base, name) for name in local}
            base.__dict__.update(local)
            try:
                embedded = super()._embed(ids, weight)
            finally:
                base.__dict__.update(saved)
            output: Tensor = strategy.after(base, embedded, mesh)
            return output


class AdaptedLoha(AdaptedLayer):
    """A LoHa layer: the Hadamard product of this rank's rows or columns of two low-rank matrices."""

    def get_delta_weight(self, adapter_name: str, **options: Any) -> Tensor:
        """The adapter's update of this rank's weight."""
        base = untyped(self.get_base_layer())
        weight = base.weight
        base._parameters["weight"] = local_tensor(weight)  # PEFT reads its shape
        try:
            delta: Tensor = super().get_delta_weight(adapter_name, **options)
        finally:
            base._parameters["weight"] = weight
        return delta

    def _get_delta_activations(self, adapter_name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = untyped(self.get_base_layer())
        strategy, shard = STRATEGY.find(base), SHARD.of(base.weight)
        if strategy is None or shard.layout is None:
            plain: Tensor = super()._get_delta_activations(adapter_name, x)
            return plain
        mesh = untyped(shard.group.device_mesh)
        with open_forward(base):
            (x,) = strategy.before(base, (x,), mesh)
            output: Tensor = strategy.after(base, super()._get_delta_activations(adapter_name, x), mesh)
            return output


_MIXINS: dict[str, type[AdaptedLayer]] = {"lora_A": AdaptedLora, "hada_w1_a": AdaptedLoha}
"""Parameters of a layer of PEFT -> its mixin; others have AdaptedLayer."""


@cache
def adapted_class(cls: type) -> type:
    """The subclass of the class of PEFT's layer that is also an AdaptedLayer."""
    if issubclass(cls, AdaptedLayer):
        return cls
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "peft_class": cls}
    mixin = next((_MIXINS[name] for name in untyped(cls).adapter_layer_names if name in _MIXINS), AdaptedLayer)
    return type(cls.__name__, (mixin, cls), names)


@contextmanager
def _local_weights(layer: Any) -> Iterator[None]:
    """Replace the parameters of a layer's base and adapters by this rank's plain tensors in the block."""
    saved = [(owner, dict(owner._parameters)) for owner in (layer.get_base_layer(), *layer.owners())]
    for owner, params in saved:
        for name, param in params.items():
            if param is not None:
                local = nn.Parameter(local_tensor(param), requires_grad=False)
                if hasattr(param, SHARD.name):
                    SHARD.put(local, SHARD.of(param))
                owner._parameters[name] = local
    try:
        yield
        for owner, params in saved:
            for name, param in params.items():
                if param is not None and owner._parameters[name].data_ptr() != local_tensor(param).data_ptr():
                    local_tensor(param).copy_(owner._parameters[name])  # peft put another tensor in its place
    finally:
        for owner, params in saved:
            owner._parameters.update(params)


class SlicedDropout(nn.Module):
    """Dropout of sharded features, as in one process: all ranks draw the mask of all features, and use their slice."""

    def __init__(self, p: float, split: Split, rank: int) -> None:
        super().__init__()
        self.p, self.split, self.rank = p, split, rank

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., features/size)."""
        if not self.training:
            return x
        mask = dropout(x.new_ones((*x.shape[:-1], self.split.length)), self.p)
        own: Tensor = untyped(take(mask, Layout(x.ndim - 1, self.split), self.rank))
        return x * own
