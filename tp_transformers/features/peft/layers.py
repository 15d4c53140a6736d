"""The layer of PEFT on a sharded base layer: it merges, unmerges and computes on this rank's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from ...anatomy import check_values, is_transposed
from ...errors import UnsupportedError
from ...marks import untyped
from ...slices.layout import Layout, Split
from ...strategies import SHARD, STRATEGY, local_tensor, take
from ...strategies.forward.attach import Forward
from ...strategies.signature import FEATURES

PeftLayer: Any = object
"""Base of the mixins; in the class of a layer, a layer of PEFT follows them in the MRO."""


class AdaptedLayer(PeftLayer):
    """A layer of PEFT on a sharded base layer."""

    peft_class: type
    """Its class in PEFT."""
    reads_parameters_of: type = nn.ParameterDict
    """The owners of parameters that its forward reads; other modules have a forward of their own."""

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
        check_values(untyped(self.get_base_layer()), "merged adapters")
        with local_weights(self):
            super().merge(*args, **kwargs)

    def unmerge(self) -> None:
        """Subtract the adapters from this rank's weight."""
        with local_weights(self):
            super().unmerge()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the layer's own class, on this rank's shards of parameters that are not a module's weight."""
        owners: list[Any] = [
            own for own in self.owners() if isinstance(own, self.reads_parameters_of) and own._parameters
        ]
        # FSDP's parameters have no shard.
        views = [{name: own.tp_shards[name].view(param) for name, param in own._parameters.items()} for own in owners]
        with parameters_as(*zip(owners, views, strict=True)) if owners else nullcontext():
            return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The forward on local tensors; by default, that of the layer's class in PEFT."""
        return super().forward(*args, **kwargs)


class AdaptedFactors(AdaptedLayer):
    """A layer of two matrices, A (r, in) and B (out, r), with trained factors beside them."""

    factor: str
    """The attribute with a factor of each adapter."""
    dropouts: str
    """The attribute with the dropout of each adapter."""

    def compute(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's outputs, with the adapters' updates of this rank's rows or columns added."""
        if self.disable_adapters or self.merged:
            merged: Tensor = super().compute(x, *args, **kwargs)
            return merged
        result: Tensor = self.base_layer(x, *args, **kwargs)
        factors = getattr(self, self.factor)
        for adapter in self.active_adapters:
            if adapter in factors:
                inputs = getattr(self, self.dropouts)[adapter](self._cast_input_dtype(x, factors[adapter].dtype))
                result = result + self.update(adapter, inputs).to(result.dtype)
        return result

    def update(self, adapter: str, x: Tensor) -> Tensor:
        """The adapter's update of this rank's outputs; if the inputs are sharded, summed while it is as wide as r."""
        base, (a, inner, b, outer) = self.get_base_layer(), self.matrices(adapter)
        if split_of(base)[1]:
            reduced = communicating(base, x, lambda own: linear(own, a))
            summed: Tensor = outer * linear(inner * reduced, b)
            return summed
        return communicating(base, x, lambda own: outer * linear(inner * linear(own, a), b))

    def matrices(self, adapter: str) -> tuple[Tensor, Tensor, Tensor, Any]:
        """This rank's columns of A or rows of B, with their factors: A, of r values, B, of this rank's outputs."""
        raise NotImplementedError


def inputs_split(base: Any) -> Split | None:
    """Split of the inputs that `base` takes; None if it takes all of them."""
    split, is_input = split_of(base)
    return split if is_input and STRATEGY.of(base).signature.takes is FEATURES else None


def split_of(base: Any) -> tuple[Split | None, bool]:
    """Split of the weight of `base`, and whether it runs over the input features; None if each rank has all of it."""
    shards = vars(base).get("tp_shards")
    shard = SHARD.find(getattr(base, "weight", None)) if shards is None else shards.get("weight")
    if STRATEGY.find(base) is None or shard is None or shard.layout is None:
        return None, False
    return shard.layout.split, shard.layout.dim == (0 if isinstance(base, nn.Embedding) or is_transposed(base) else 1)


@contextmanager
def parameters_as(*replaced: tuple[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Replace parameters in the block: (module, tensors by the names of its parameters) each."""
    saved = [(module, {name: module._parameters[name] for name in tensors}) for module, tensors in replaced]
    try:
        for module, tensors in replaced:
            module._parameters.update(tensors)
        yield
    finally:
        for module, params in saved:
            module._parameters.update(params)


def communicating(base: Any, x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """`product` of this rank's inputs, with the communication of the layer `base`, and without its bias."""
    if split_of(base)[0] is None:
        return product(x)
    strategy, mesh = STRATEGY.of(base), untyped(base.tp_shards["weight"].group.device_mesh)
    base.tp_forwards.append(Forward({}))  # for `before` and `after`, without the forward of `base`
    try:
        with parameters_as((base, {"bias": None} if "bias" in base._parameters else {})):
            (x,) = strategy.before(base, (x,), mesh)
            output: Tensor = strategy.after(base, product(x), mesh)
            return output
    finally:
        base.tp_forwards.pop()


def product(base: Any, x: Tensor) -> Tensor:
    """`x` times the weight of the linear `base`, without its bias."""
    weight = base.tp_shards["weight"].view(base.weight) if base.tp_shards else base.weight
    return communicating(base, x, lambda own: linear(own, weight.T if is_transposed(base) else weight))


@contextmanager
def local_weights(layer: Any) -> Iterator[None]:
    """Replace the parameters of a layer's base and adapters by this rank's plain tensors in the block."""
    params = [
        (owner, name, param)
        for owner in (layer.get_base_layer(), *layer.owners())
        for name, param in owner._parameters.items()
        if param is not None
    ]
    local = [nn.Parameter(local_tensor(param), requires_grad=False) for _, _, param in params]
    for own, (_, _, param) in zip(local, params, strict=True):
        if hasattr(param, SHARD.name):
            SHARD.put(own, SHARD.of(param))
    with parameters_as(*((owner, {name: own}) for own, (owner, name, _) in zip(local, params, strict=True))):
        yield
        for owner, name, param in params:
            if owner._parameters[name].data_ptr() != local_tensor(param).data_ptr():
                local_tensor(param).copy_(owner._parameters[name])  # peft put another tensor in its place


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
        return x * take(mask, Layout(x.ndim - 1, self.split), self.rank)
