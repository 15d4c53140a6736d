"""An adapter's matrices: sharded like the base layer, and gathered while PEFT computes on full ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...marks import untyped
from ...ranks import direct
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Layout
from ...strategies import (
    SHARD,
    STRATEGY,
    ParamShard,
    ReplicateParallel,
    TensorParallelLayer,
    full_tensor,
    local_tensor,
    shard_of,
    take,
)
from ...strategies.signature import BATCH, FEATURES
from ..state_dict import keep_state, split_module
from .layers import AdaptedLayer, SlicedDropout, adapted_class


def split_adapter(name: str, layer: Any, adapter: str, group: TensorParallelGroup) -> None:
    """Shard the adapter called `adapter` of a LoRA layer like its base layer, if it is not sharded yet."""
    base = layer.get_base_layer()
    of_a, of_b = strategies_of(base)
    shard = SHARD.find(base.weight)
    layout = shard.layout if shard is not None else None
    split = layout.split if layout is not None else None
    layer.__class__ = adapted_class(untyped(type(layer)))
    if adapter in layer.lora_embedding_A:
        rows = Layout(1, layout.split) if layout is not None and layout.dim == 0 else None
        _split_parameter(layer.lora_embedding_A, adapter, rows, group)
        _split_parameter(layer.lora_embedding_B, adapter, None, group)
        return
    for kind, strategy in (("lora_A", of_a), ("lora_B", of_b)):
        module = getattr(layer, kind)[adapter]
        if hasattr(module, STRATEGY.name):
            continue
        bound = strategy.bind(module, group.size, name=f"{name}.{kind}", split=split, config=strategy.config)
        split_module(module, bound, group)
    dropped = layer.lora_dropout[adapter]
    if split is not None and of_a.signature.takes is FEATURES and isinstance(dropped, nn.Dropout):
        layer.lora_dropout[adapter] = SlicedDropout(dropped.p, split, group.rank)


def strategies_of(base: nn.Module) -> tuple[TensorParallelLayer, TensorParallelLayer]:
    """The strategies of A and B, from the strategy of the base layer. Raises UnsupportedError if it has no adapters."""
    strategy = STRATEGY.find(base)
    if strategy is None and isinstance(getattr(base, "weight", None), DTensor):
        raise unsupported(type(base).__name__, "an adapter on a layer that torch's parallelize_module has sharded")
    if strategy is None:
        return ReplicateParallel(), ReplicateParallel()
    refused = unsupported(strategy.name, f"an adapter on a layer with the strategy {strategy}")
    if strategy.signature.takes is BATCH:
        raise refused
    try:
        return strategy.adapter()
    except NotImplementedError:
        raise refused from None


def _split_parameter(owner: nn.Module, name: str, layout: Layout | None, group: TensorParallelGroup) -> None:
    """Shard one parameter that is not the weight of a module; all ranks take rank 0's values."""
    param: nn.Parameter = getattr(owner, name)
    if hasattr(param, SHARD.name):
        return
    if not param.is_meta:
        param.data = param.data.contiguous()
        direct.broadcast(param.data, group.process_group, 0)
    local: Tensor = untyped(take(param.data, layout, group.rank))
    shard = ParamShard(param.shape, layout, group, use_dtensor=layout is not None)
    owner._parameters[name] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
    owner.__dict__.setdefault("tp_shards", {})[name] = shard
    keep_state(owner)


def unsupported(subject: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{subject} on a tensor-parallel model",
        got=got,
        expected="plain LoRA on linears and embeddings",
        fix="Leave it out, or train this adapter in one process.",
    )


@contextmanager
def full_adapters(model: nn.Module, group: TensorParallelGroup, names: Collection[str] | None = None) -> Iterator[None]:
    """Give LoRA layers PEFT's own class and full adapters in the block; then shard their matrices again. Collective.

    Parameters that keep their shape stay the same objects. New ones take rank 0's values.

    Args:
        names: the adapters to gather; None for all.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLayer)]
    saved = [entry for layer in layers for entry in _parameters(layer, names)]
    full_params = [nn.Parameter(full_tensor(param), requires_grad=param.requires_grad) for _, _, param in saved]
    try:
        for (owner, name, _), full in zip(saved, full_params, strict=True):
            owner._parameters[name] = full
        for layer in layers:
            untyped(layer).__class__ = layer.peft_class
        yield
    finally:
        for layer in layers:
            untyped(layer).__class__ = adapted_class(untyped(type(layer)))
        for owner, name, param in saved:
            value = owner._parameters.get(name)
            if value is not None:
                owner._parameters[name] = _shard_again(value, param)
    for name, module in list(model.named_modules()):
        adapters: Any = untyped(module).r if hasattr(module, "lora_embedding_A") else ()
        for adapter in adapters:
            split_adapter(name, module, adapter, group)


def _parameters(layer: Any, adapters: Collection[str] | None) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name in it, parameter) of the given adapters of a LoRA layer; None for all."""
    modules = [*layer.lora_A.items(), *layer.lora_B.items()]
    modules += [(None, owner) for owner in (layer.lora_embedding_A, layer.lora_embedding_B)]
    for adapter, module in modules:
        for name, param in module._parameters.items():
            if param is not None and (adapters is None or (adapter or name) in adapters):
                yield module, name, param


def _shard_again(value: nn.Parameter, param: nn.Parameter) -> nn.Parameter:
    """`param` with this rank's shard of `value`; a new parameter if the LoRA rank has changed."""
    shard = shard_of(param)
    assert shard is not None
    if value.shape != shard.shape:
        shard = dataclasses.replace(shard, shape=value.shape)
        return shard.wrap(shard.own(value.detach()).clone(), requires_grad=value.requires_grad)
    local_tensor(param).copy_(shard.own(value.detach()))
    param.requires_grad_(value.requires_grad)
    return param
