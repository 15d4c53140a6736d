"""An adapter's matrices: sharded like the base layer, and gathered while PEFT computes on full ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...features.full_parameters.full_parameters import full_parameters
from ...marks import untyped
from ...model.tensor_parallel_model import keep_state
from ...ranks import direct
from ...ranks.group import GROUP, TensorParallelGroup
from ...slices.layout import Layout, Split
from ...strategies import (
    SHARD,
    STRATEGY,
    ParamShard,
    ReplicateParallel,
    TensorParallelLayer,
    local_tensor,
    shard_module,
    take,
)
from ...strategies.signature import BATCH, FEATURES, PARTIAL, SEQUENCE
from .kinds import adapted_class
from .layers import AdaptedFactors, SlicedDropout, inputs_split, split_of
from .lora import AdaptedLora

_AXES: dict[str, tuple[int | None, int | None]] = {
    "lora_embedding_A": (None, 1),
    "lora_A": (None, 1),
    "lora_B": (0, None),
    "hada_w1_a": (0, None),
    "hada_w1_b": (None, 1),
    "hada_w2_a": (0, None),
    "hada_w2_b": (None, 1),
    "vera_lambda_b": (0, None),
}
"""Name of adapters' parameters -> their dims of the base layer's output and input features; None without such a dim."""


def split_adapter(name: str, layer: Any, adapter: str, group: TensorParallelGroup) -> None:
    """Shard the adapter called `adapter` of a layer of PEFT like its base layer, if it is not sharded yet."""
    layer.__class__ = adapted_class(untyped(type(layer)))
    keep_shards_of(layer.get_base_layer())
    for kind in layer.adapter_layer_names:
        owner = getattr(layer, kind)
        if adapter not in owner:
            continue
        if isinstance(owner, nn.ParameterDict):
            layout, is_partial = _layout_of(name, layer, kind)
            split_parameter(owner, adapter, layout, group, is_partial)
        elif kind in ("lora_A", "lora_B") and hasattr(layer, "get_param"):
            layout, is_partial = _layout_of_factor(layer, kind)
            split_parameter(owner[adapter], "weight", layout, group, is_partial)
        elif kind in ("lora_A", "lora_B"):
            _split_lora(f"{name}.{kind}", layer, kind, adapter, group)
        elif kind == "oft_R":
            _split_rotations(name, layer, owner[adapter], group)
        elif kind == "lora_magnitude_vector":
            _split_magnitudes(name, owner[adapter], layer.get_base_layer(), group)
    if isinstance(layer, AdaptedFactors) and adapter in getattr(layer, layer.factor):
        _slice_dropout(getattr(layer, layer.dropouts), adapter, inputs_split(layer.get_base_layer()), group.rank)


def split_tokens(layer: Any, adapter: str, group: TensorParallelGroup) -> None:
    """Keep the rows of a TrainableTokensLayer replicated, with partial gradients if the base layer is sharded."""
    layer.__class__ = adapted_class(untyped(type(layer)))
    keep_shards_of(layer.base_layer)
    if adapter in layer.trainable_tokens_delta:
        shard: ParamShard = layer.base_layer.tp_shards["weight"]
        is_partial = shard.layout is not None
        own = torch.arange(shard.shape[0])
        if shard.layout is not None and shard.layout.dim == 0:
            own = take(own, shard.layout, group.rank)
        found = (own[:, None] == torch.tensor(layer.token_indices[adapter])).nonzero(as_tuple=True)
        rows = layer.__dict__.setdefault("tp_rows", {})
        rows[adapter] = tuple(index.to(group.device) for index in found)
        split_parameter(layer.trainable_tokens_delta, adapter, None, group, is_partial)


def keep_shards_of(base: nn.Module) -> None:
    """Store the shards of the parameters of `base` on it, too: parameters of FSDP lose theirs."""
    shards = {name: SHARD.find(param) for name, param in base._parameters.items()}
    base.__dict__.setdefault("tp_shards", {name: shard for name, shard in shards.items() if shard is not None})


def _split_lora(name: str, layer: Any, kind: str, adapter: str, group: TensorParallelGroup) -> None:
    """Shard `lora_A` or `lora_B` of a linear, by the strategy that the base layer's has for it."""
    base, module = layer.get_base_layer(), getattr(layer, kind)[adapter]
    if hasattr(module, STRATEGY.name):
        return
    strategy = strategies_of(base)[kind == "lora_B"]
    shard = SHARD.find(base.weight)
    split = shard.layout.split if shard is not None and shard.layout is not None else None
    bound = strategy.bind(module, group.size, name=name, split=split, config=strategy.config)
    shard_module(module, bound, group)
    keep_state(module)
    if strategy.signature.takes is FEATURES:
        _slice_dropout(layer.lora_dropout, adapter, split, group.rank)


def _slice_dropout(dropouts: Any, adapter: str, split: Split | None, rank: int) -> None:
    """Replace the dropout of an adapter by one of this rank's features, if they are sharded by `split`."""
    dropout = dropouts[adapter]
    if split is not None and isinstance(dropout, nn.Dropout):
        dropouts[adapter] = SlicedDropout(dropout.p, split, rank)


def _split_magnitudes(name: str, magnitudes: Any, base: nn.Module, group: TensorParallelGroup) -> None:
    """Shard the magnitudes of DoRA, one for each output of `base`."""
    layout = layout_of_vector("DoRA", name, base, is_of_inputs=False)
    split_parameter(magnitudes, "weight", layout, group, layout is None and _has_partial_gradients(base))
    magnitudes.__class__ = adapted_class(untyped(type(magnitudes)))
    magnitudes.tp_sums = split_of(base)[1]


def _split_rotations(name: str, layer: Any, rotations: Any, group: TensorParallelGroup) -> None:
    """Shard the blocks of OFT, of (blocks, elements), where the inputs of the base layer are sharded."""
    base, size = layer.get_base_layer(), rotations.block_size
    split, layout = inputs_split(base), None
    if split is not None:
        rotations.in_features = split.widths[group.rank]
        if not rotations.block_share:
            ranges = tuple(tuple((start // size, stop // size) for start, stop in of_rank) for of_rank in split.ranges)
            layout = Layout(0, Split(split.length // size, ranges))
            rotations.r = layout.split.widths[group.rank]
    # The gradients of all rotated inputs are summed over the ranks.
    is_partial = layout is None and (split is not None or _has_partial_gradients(base))
    split_parameter(rotations, "weight", layout, group, is_partial)


def check_rotations(name: str, base: nn.Module, config: Any) -> None:
    """Raise UnsupportedError if ranks have parts of the blocks of inputs that OFT rotates."""
    from peft.tuners.oft import OFTLayer

    if isinstance(base, nn.Embedding):
        raise unsupported("OFT", f"the embedding {name}")
    split = inputs_split(base)
    if split is None and split_of(base)[1]:  # a merge would need the blocks of this rank's columns
        raise unsupported("OFT", f"{name}, which has the strategy {STRATEGY.of(base)}")
    if split is None:
        return
    size = config.oft_block_size or config.r
    if split.length % size or size > split.length:
        size = OFTLayer.adjust_oft_parameters(None, split.length, size)
    size = size if config.oft_block_size else split.length // size
    largest = math.gcd(split.length, *(index for of_rank in split.ranges for span in of_rank for index in span))
    if largest % size:
        raise UnsupportedError(
            f"OFT on {name}",
            got=f"blocks of {size} inputs, of which some are on two ranks",
            expected="complete blocks on each rank",
            fix=f"Take an oft_block_size that divides {largest}, or leave out this module.",
        )


def _layout_of(name: str, layer: Any, kind: str) -> tuple[Layout | None, bool]:
    """Layout of a parameter of an adapter, and whether each rank has a partial sum of its gradient."""
    base = layer.get_base_layer()
    if kind == "ia3_l":
        layout = layout_of_vector("IA3", name, base, is_of_inputs=layer.is_feedforward)
        return layout, layout is None and _has_partial_gradients(base)
    split, is_input = split_of(base)
    dim = _AXES.get(kind, (None, None))[is_input]
    if split is None or dim is None:
        if kind.startswith("lora_embedding"):
            return None, False
        # Factors of this rank's shard; those of VeRA and AdaLoRA follow a sum of inputs' features.
        is_factor = split is not None and not (kind.startswith(("vera", "lora")) and is_input)
        return None, _has_partial_gradients(base) or is_factor
    return Layout(dim, split), False


def _layout_of_factor(layer: Any, kind: str) -> tuple[Layout | None, bool]:
    """As `_layout_of`, for a matrix of LoRA on experts; it is replicated if a rank has complete experts."""
    param = layer.get_param()
    shard = SHARD.of(param)
    if shard.layout is None:
        return None, shard.sums_gradients
    is_input = param.ndim - shard.layout.dim == (1 if param.ndim == 2 or layer._did_swap_in_out_features else 2)
    if (param.ndim == 3 and shard.layout.dim == 0) or is_input != (kind == "lora_A"):
        return None, True
    return Layout(1 if is_input else 0, shard.layout.split), False


def layout_of_vector(adapter: str, name: str, base: nn.Module, *, is_of_inputs: bool) -> Layout | None:
    """Layout of an adapter's vector that scales the inputs or the outputs of `base`: (1, in), (out, 1) or (out).

    Raises UnsupportedError if this rank has a shard of the weight along the vector, but all of these activations.
    """
    split, is_input = split_of(base)
    if split is None or is_input != is_of_inputs:
        return None
    strategy = STRATEGY.of(base)
    if FEATURES is not (strategy.signature.takes if is_input else strategy.signature.leaves):
        raise unsupported(adapter, f"{name}, which has the strategy {strategy}")
    return Layout(1 if is_input else 0, split)


def _has_partial_gradients(base: Any) -> bool:
    """True if vectors that scale all inputs or outputs of `base` get partial sums of their gradients.

    This rank then has only some of the tokens, or the block around `base` sums outputs, and gradients of inputs.
    """
    if (strategy := STRATEGY.find(base)) is None:
        return False
    signature = strategy.signature
    is_partial = not {SEQUENCE, BATCH, PARTIAL}.isdisjoint((signature.takes, signature.leaves, signature.gradient))
    return is_partial or (signature.leaves is FEATURES and signature.inside is None)


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


def split_parameter(
    owner: nn.Module, name: str, layout: Layout | None, group: TensorParallelGroup, is_partial: bool = False
) -> None:
    """Shard one parameter that is not the weight of a module; all ranks take rank 0's values."""
    param: nn.Parameter = getattr(owner, name)
    if hasattr(param, SHARD.name):
        return
    if not param.is_meta:
        param.data = param.data.contiguous()
        direct.broadcast(param.data, group.process_group, 0)
    local = take(param.data, layout, group.rank)
    shard = ParamShard(param.shape, layout, group, layout is not None, sums_gradients=is_partial)
    owner._parameters[name] = shard.wrap(local.clone(), requires_grad=param.requires_grad)
    owner.__dict__.setdefault("tp_shards", {})[name] = shard
    keep_state(owner)


def take_indices(owner: Any, name: str, dim: int, indices: Sequence[int]) -> None:
    """Keep `indices` of a dim of a parameter that is not sharded along it."""
    param, shard = owner._parameters[name], owner.tp_shards[name]
    assert param is not None
    local = local_tensor(param).index_select(dim, torch.tensor(indices, dtype=torch.long, device=param.device))
    shape = torch.Size([*shard.shape[:dim], len(indices), *shard.shape[dim + 1 :]])
    owner.tp_shards[name] = shard = dataclasses.replace(shard, shape=shape)
    owner._parameters[name] = shard.wrap(local, requires_grad=param.requires_grad)


def unsupported(subject: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{subject} on a tensor-parallel model",
        got=got,
        expected="LoRA, DoRA, AdaLoRA and OFT on linears, IA3, LoHa, LoKr, VeRA, LN tuning, prompts or prefixes",
        fix="Leave it out, or train this adapter in one process.",
    )


def check_model(model: Any) -> None:
    """Raise UnsupportedError for a model with the bits of one process, as adapters sum over the ranks, and for a
    data-parallel model, as its copies would not have the same adapters."""
    if model.tp_resolution.keeps_order:
        raise UnsupportedError(
            "peft on a tensor-parallel model",
            got="an adapter with tp_invariant=True",
            expected="an adapter without tp_invariant",
            fix="Load the model without tp_invariant.",
        )
    if hasattr(model, "set_requires_gradient_sync"):
        raise UnsupportedError(
            "peft on a model with data-parallel copies",
            got="adapters that come after the copies",
            expected="adapters before them",
            fix="Load with device_mesh, add the adapter, then call tp_transformers.data_parallel(peft_model, mesh).",
        )


@contextmanager
def full_adapters(model: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """Give LoRA layers PEFT's own class and full adapters in the block; see `full_parameters`. Collective.

    A model that is not tensor-parallel stays as it is.

    Args:
        names: the adapters to gather; None for all.
    """
    group = GROUP.find(model)
    if group is None or group.device_mesh is None:
        yield
        return
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLora)]
    try:
        with full_parameters(model, parameters=[param for layer in layers for param in _parameters(layer, names)]):
            for layer in layers:
                untyped(layer).__class__ = layer.peft_class
            yield
    finally:
        for layer in layers:
            untyped(layer).__class__ = adapted_class(untyped(type(layer)))
    for name, module in list(model.named_modules()):
        adapters: Any = untyped(module).r if hasattr(module, "lora_embedding_A") else ()
        for adapter in adapters:
            split_adapter(name, module, adapter, group)


def _parameters(layer: Any, adapters: Collection[str] | None) -> Iterator[nn.Parameter]:
    """The parameters of the given adapters of a LoRA layer; None for all."""
    modules = [*layer.lora_A.items(), *layer.lora_B.items(), *layer.lora_magnitude_vector.items()]
    modules += [(None, owner) for owner in (layer.lora_embedding_A, layer.lora_embedding_B)]
    for adapter, module in modules:
        for name, param in module.named_parameters():
            if adapters is None or (adapter or name) in adapters:
                yield param
