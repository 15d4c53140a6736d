"""Layers of PEFT on a sharded base layer: they merge, unmerge and compute on this rank's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from ...anatomy.linears import is_transposed
from ...checkpoint.quantization.packed import check_not_packed
from ...errors import UnsupportedError
from ...marks import untyped
from ...ranks import direct
from ...slices.layout import Layout, Split
from ...strategies import SHARD, STRATEGY, ParamShard, local_tensor, open_forward, take

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
        owners: list[nn.Module] = []
        for name in self.adapter_layer_names:
            parameters = getattr(self, name)
            owners += parameters.values() if isinstance(parameters, nn.ModuleDict) else [parameters]
        return tuple(owners)

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
            return self.compute(*args, **kwargs)
        saved = [dict(owner._parameters) for owner in owners]
        try:
            for owner in owners:
                for name, param in owner._parameters.items():  # FSDP's parameters have no shard
                    owner._parameters[name] = owner.tp_shards[name].view(param)
            return self.compute(*args, **kwargs)
        finally:
            for owner, params in zip(owners, saved, strict=True):
                owner._parameters.update(params)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The forward on local tensors; by default, that of the layer's class in PEFT."""
        return super().forward(*args, **kwargs)


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


class AdaptedParam(AdaptedLora):
    """LoRA on a parameter: the weights of all experts (experts, in, out) or (experts, out, in), or one matrix.

    A is (experts * r, in), and B (out, r * experts).
    """

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weights."""
        with _local_weights(self):
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
        with parameter_as(base, name, weight):
            yield


class AdaptedDora(_Layer):
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
        magnitudes, params = self._parameters["weight"], dict(base_layer._parameters)
        shards = base_layer.tp_shards
        local = {name: shards[name].view(param) if name in shards else param for name, param in params.items()}
        if base_result is None:  # of inputs that dropout changed
            base_result = _product(base_layer, x)
            if local["bias"] is not None:
                base_result = base_result + local["bias"]  # PEFT subtracts it
        self._parameters["weight"] = self.tp_shards["weight"].view(magnitudes)
        base_layer._parameters.update(local)
        try:
            updates: Tensor = super().forward(x, base_layer=base_layer, base_result=base_result, **named)
        finally:
            self._parameters["weight"] = magnitudes
            base_layer._parameters.update(params)
        return updates


class AdaptedLoha(AdaptedLayer):
    """A LoHa layer: the Hadamard product of this rank's rows or columns of two low-rank matrices."""

    def get_delta_weight(self, adapter_name: str, **options: Any) -> Tensor:
        """The adapter's update of this rank's weight."""
        base = untyped(self.get_base_layer())
        with parameter_as(base, "weight", local_tensor(base.weight)):  # PEFT reads its shape
            delta: Tensor = super().get_delta_weight(adapter_name, **options)
        return delta

    def _get_delta_activations(self, adapter_name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _communicating(self.get_base_layer(), x, partial(super()._get_delta_activations, adapter_name))


class AdaptedLokr(AdaptedLoha):
    """A LoKr layer: this rank's rows or columns of a Kronecker product, which every rank computes in full."""

    def get_delta_weight(self, adapter_name: str, **options: Any) -> Tensor:
        """The adapter's update of this rank's weight."""
        base = untyped(self.get_base_layer())
        shard = base.tp_shards["weight"]
        with parameter_as(base, "weight", torch.empty(1, dtype=base.weight.dtype, device="meta").expand(shard.shape)):
            delta: Tensor = super(AdaptedLoha, self).get_delta_weight(adapter_name, **options)
        own: Tensor = untyped(take(delta, shard.layout, shard.group.rank))
        return own.contiguous()  # a view would keep the product until the backward


class AdaptedVera(AdaptedLayer):
    """A VeRA layer: two frozen random matrices, A (r, in) and B (out, r), between trained vectors of r and out."""

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's outputs, with the adapters' updates of this rank's rows or columns added."""
        if self.disable_adapters or self.merged:
            merged: Tensor = super().compute(x, *args, **kwargs)
            return merged
        base = self.get_base_layer()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        for adapter in self.active_adapters:
            if adapter in self.vera_lambda_d:
                inputs = self._cast_input_dtype(x, self.vera_lambda_d[adapter].dtype)
                inputs = self.vera_dropout[adapter](inputs)
                result = result + self._update(base, adapter, inputs).to(result.dtype)
        return result

    def _update(self, base: Any, adapter: str, x: Tensor) -> Tensor:
        a, b = self._projections(adapter)
        if split_of(base)[1]:
            reduced = _communicating(base, x, lambda own: linear(own, a))  # summed while it is as wide as r
            update: Tensor = self.vera_lambda_b[adapter] * linear(self.vera_lambda_d[adapter] * reduced, b)
            return update
        scale, out_scale = self.vera_lambda_d[adapter], self.vera_lambda_b[adapter]
        return _communicating(base, x, lambda own: out_scale * linear(scale * linear(own, a), b))

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The adapter's update of this rank's weight."""
        a, b = self._projections(adapter)
        update: Tensor = (self.vera_lambda_b[adapter][:, None] * b) @ (self.vera_lambda_d[adapter][:, None] * a)
        return update.T if self.fan_in_fan_out else update

    def _projections(self, adapter: str) -> tuple[Tensor, Tensor]:
        """This rank's columns of A or rows of B; PEFT's are as large as the largest layer needs."""
        base = self.get_base_layer()
        a, b = self.vera_A[adapter][:, : self.in_features], self.vera_B[adapter][: self.out_features]
        split, is_input = split_of(base)
        if split is None:
            return a, b
        rank = base.tp_shards["weight"].group.rank
        if is_input:
            return untyped(take(a, Layout(1, split), rank)), b
        return a, untyped(take(b, Layout(0, split), rank))


def split_of(base: Any) -> tuple[Split | None, bool]:
    """Split of the weight of `base`, and whether it runs over the input features; None if each rank has all of it."""
    shards = vars(base).get("tp_shards")
    shard = SHARD.find(getattr(base, "weight", None)) if shards is None else shards.get("weight")
    if STRATEGY.find(base) is None or shard is None or shard.layout is None:
        return None, False
    return shard.layout.split, shard.layout.dim == (0 if isinstance(base, nn.Embedding) or is_transposed(base) else 1)


@contextmanager
def parameter_as(module: nn.Module, name: str, tensor: Any) -> Iterator[None]:
    """Replace a parameter of `module` in the block."""
    param, module._parameters[name] = module._parameters[name], tensor
    try:
        yield
    finally:
        module._parameters[name] = param


def _communicating(base: Any, x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """`product` of this rank's inputs, with the communication of the linear `base`."""
    if split_of(base)[0] is None:
        return product(x)
    strategy, mesh = STRATEGY.of(base), untyped(base.tp_shards["weight"].group.device_mesh)
    with open_forward(base):
        (x,) = strategy.before(base, (x,), mesh)
        output: Tensor = strategy.after(base, product(x), mesh)
        return output


def _product(base: Any, x: Tensor) -> Tensor:
    """`x` times the weight of the linear `base`, without its bias."""
    weight = base.tp_shards["weight"].view(base.weight) if base.tp_shards else base.weight
    return _communicating(base, x, lambda own: linear(own, weight.T if is_transposed(base) else weight))


_MIXINS: dict[str, type] = {
    "lora_A": AdaptedLora,
    "hada_w1_a": AdaptedLoha,
    "lokr_w1": AdaptedLokr,
    "vera_lambda_d": AdaptedVera,
}
"""Parameters of a layer of PEFT -> its mixin; others have AdaptedLayer."""


@cache
def adapted_class(cls: type) -> type:
    """The subclass of the class of PEFT's layer that is also an AdaptedLayer; for DoRA's magnitudes, AdaptedDora."""
    if issubclass(cls, AdaptedLayer | AdaptedDora):
        return cls
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "peft_class": cls}
    parameters = getattr(cls, "adapter_layer_names", None)
    if parameters is None:
        mixin: type = AdaptedDora
    elif hasattr(cls, "get_param"):
        mixin = AdaptedParam
    else:
        mixin = next((_MIXINS[name] for name in parameters if name in _MIXINS), AdaptedLayer)
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
