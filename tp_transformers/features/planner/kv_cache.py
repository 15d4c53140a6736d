"""Memory of the KV cache per head, and of the states of mixers: transformers' cache, filled on the meta device.

The cache of transformers decides which tokens a layer keeps: all, a window, or none if it uses another layer's. Here
it is filled with tensors of one head on the meta device, and measured.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ...anatomy import (
    CACHES,
    HEAD_SIZES,
    features,
    first_of,
    head_counts,
    is_attention,
    is_cross_attention,
    layer_number,
)
from ...errors import PlanError, error_text, shorten
from ...plans.attention import AttentionHeads
from ...plans.rule import SplitHeads
from ..mixers.mixer import MixerHeads

_CACHES = {*CACHES, "layer_past", "layer_state"}
"""Names of the cache argument of attention modules."""
LATENT_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Config fields of latent attention: widths of the latent, and of the keys and values of a head."""


@dataclass(frozen=True)
class Cached:
    """Keys and values that one attention module keeps."""

    name: str
    tokens: int
    """Cached tokens per sequence."""
    nbytes: tuple[int, ...]
    """Bytes on every rank."""


def cached_attention(
    model: PreTrainedModel,
    attention: Mapping[str, AttentionHeads],
    size: int,
    *,
    batch: int,
    context: int,
    encoder_context: int | None = None,
) -> Iterator[Cached]:
    """Measure the KV cache of `model` for sequences of `context` tokens, with the last token generated.

    Args:
        attention: attention module -> splits of its heads; other modules are replicated.
        batch: number of sequences.
        context: tokens per sequence; 0 for no cache.
        encoder_context: tokens of the encoder, for cross-attention; None for `context`.
    """
    if not context:
        return
    prefix = decoder_name(model)
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    for name, module in model.get_submodule(prefix).named_modules(prefix=prefix):
        if not is_attention(module) or is_around_attention(module):
            continue
        index = cache_index(module)
        # A module without its own cache layer uses an earlier one, or keeps no keys and values.
        if index is None or index >= len(layers) or not isinstance(layers[index], DynamicLayer):
            continue
        if is_cross_attention(name):
            steps = [context if encoder_context is None else encoder_context]
        else:
            steps = [context - 1, 1]
        heads, *widths = cached_widths(module, getattr(module, "config", None) or config)
        layer = copy.copy(layers[index])
        for step in filter(None, steps):
            layer.update(*(torch.empty(batch, 1, step, width, dtype=model.dtype, device="meta") for width in widths))
        head_bytes = sum(tensor.untyped_storage().nbytes() for tensor in (layer.keys, layer.values))
        splits = (attention[name].kv, attention[name].query) if name in attention else ()
        heads_per_rank = next((split.widths for split in splits if split.length == heads), (heads,) * size)
        tokens = head_bytes // (batch * sum(widths) * model.dtype.itemsize)
        yield Cached(name, tokens, tuple(width * head_bytes for width in heads_per_rank))


def decoder_name(model: PreTrainedModel) -> str:
    """The name of the decoder, "" for the model: encoders and towers do not run for a generated token."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not any(map(is_attention, decoder.modules())):  # the output layer of ModernBERT's decoder has that name
        return ""
    return next((name for name, module in model.named_modules() if module is decoder), "")


def cached_widths(module: nn.Module, config: Any) -> tuple[int, int, int]:
    """(cached heads, features of a key, features of a value) of an attention module.

    Raises PlanError if the config has no usable counts.
    """
    query, kv = head_counts(module, config)
    rank, nope, rope, value = (first_of((name,), module, config) or 0 for name in LATENT_WIDTHS)
    if rank and hasattr(module, "expand_kv"):  # it caches the latent and the rotary key, which all heads share
        return 1, rank, rope
    if rank and nope:  # it caches the key and value of every query head, expanded from the latent
        return query, nope + rope, value
    width = first_of(HEAD_SIZES, module, config)
    if width is None:
        hidden = first_of(("hidden_size",), config)
        if not query or not hidden:
            raise PlanError(
                f"the config of {type(module).__name__}",
                got=f"{query} query heads and a hidden size of {hidden or 0}",
                expected="numbers above 0",
                fix="Correct num_attention_heads and hidden_size in config.json.",
            )
        width = hidden // query
    projection = getattr(module, "k_proj", None)
    projected = features(projection) if isinstance(projection, nn.Module) else None
    if projected is not None and projected[1] % width == 0:
        kv = projected[1] // width
    if getattr(module, "new_decoder_architecture", False):  # Falcon caches the group's key and value per query head
        kv = query
    return kv, width, width


def cache_index(module: nn.Module) -> int | None:
    """The layer of the cache that an attention module fills; None if it takes no cache, as in an encoder."""
    indices = (getattr(module, name, None) for name in ("layer_idx", "layer_id"))
    index = next((each for each in indices if isinstance(each, int)), None)
    takes = inspect.signature(type(module).forward).parameters
    return index if getattr(module, "is_decoder", True) and not _CACHES.isdisjoint(takes) else None


def is_around_attention(module: nn.Module) -> bool:
    """True if a module contains an attention module, as T5's layers do."""
    return any(map(is_attention, list(module.modules())[1:]))


# -- states of mixers, which compute a few tokens on the meta device: a rank holds the states of its heads

TOKENS = 8
"""Tokens that a mixer computes: more than the kernel size of convolutions, so that their states have full size."""
STATES = ("conv_states", "recurrent_states")
"""Attributes of a cache layer with states."""


@dataclass(frozen=True)
class States:
    """The states that one mixer keeps."""

    name: str
    nbytes: tuple[int, ...] | None
    """Bytes on every rank; None if unknown."""
    reason: str = ""
    """Reason why they are unknown."""


def mixer_states(
    model: PreTrainedModel, mixers: Mapping[str, SplitHeads], size: int, *, batch: int
) -> Iterator[States]:
    """Measure the states of every mixer for `batch` sequences of any length, on each of `size` ranks.

    Args:
        model: on the meta device.
        mixers: module -> splits of its heads.
    """
    for name, mixer_heads in mixers.items():
        if not isinstance(mixer_heads, MixerHeads):
            continue
        try:
            kept = _kept(model, name, batch)
        except Exception as error:  # its forward needs other arguments
            yield States(name, None, shorten(error_text(error).partition("\n")[0], 200))
            continue
        if kept:
            yield States(name, _sum_by_rank(kept, mixer_heads, size))
        else:
            reason = (
                "the model makes them, and gives them to it"
                if mixer_heads.states
                else "it puts none in a cache or in itself"
            )
            yield States(name, None, reason)


def _kept(model: PreTrainedModel, name: str, batch: int) -> list[Tensor]:
    """Collect the states that one mixer puts into a cache, or keeps in itself. Raises the errors of its forward."""
    mixer, cache = model.get_submodule(name), _cache(model, batch)
    kept = _in_cache(cache, name)
    if kept:  # the cache was created with the states of all layers
        return kept
    width = model.config.get_text_config(decoder=True).hidden_size
    inputs: dict[str, Any] = {
        **dict.fromkeys(CACHES, cache),
        "position_ids": torch.arange(TOKENS, device="meta")[None],
        "attention_mask": None,
        "position_embeddings": None,
    }
    arguments = [parameter.name for parameter in inspect.signature(mixer.forward).parameters.values()]
    before = [dict(vars(submodule)) for submodule in mixer.modules()]
    try:
        with torch.no_grad():
            states = torch.empty(batch, TOKENS, width, dtype=model.dtype, device="meta")
            mixer(states, **{key: value for key, value in inputs.items() if key in arguments[1:]})
        return _in_cache(cache, name) or [
            value
            for submodule, known in zip(mixer.modules(), before, strict=True)
            for key, value in vars(submodule).items()
            if isinstance(value, Tensor) and value is not known.get(key)
        ]
    finally:
        for submodule, known in zip(mixer.modules(), before, strict=True):
            vars(submodule).update(
                {key: value for key, value in known.items() if vars(submodule).get(key) is not value}
            )


def _cache(model: PreTrainedModel, batch: int) -> Any:
    """Make an empty cache for `model`: of the cache class in its modeling file, or DynamicCache."""
    classes = [
        kind
        for name, kind in vars(sys.modules[type(model).__module__]).items()
        if name.endswith("Cache") and isinstance(kind, type) and kind.__module__ == type(model).__module__
    ]
    if not classes:
        return DynamicCache(config=model.config)
    options = {"config": model.config, "max_batch_size": batch, "dtype": model.dtype, "device": "meta"}
    parameters = inspect.signature(classes[0]).parameters
    return classes[0](**{name: value for name, value in options.items() if name in parameters})


def _in_cache(cache: Any, name: str) -> list[Tensor]:
    """Collect the states in a cache; if it stores them by layer, only those of the mixer `name`."""
    values: list[Any] = []
    for kept in (getattr(layer, kind, None) for layer in getattr(cache, "layers", ()) for kind in STATES):
        values += kept.values() if isinstance(kept, dict) else [kept]  # one tensor in older releases
    index = layer_number(name)
    for by_layer in (vars(cache).get("linear_cache"), vars(cache).get("rnn_state")):
        own = by_layer[index] if by_layer and index is not None and index < len(by_layer) else []
        values += [own] if isinstance(own, Tensor) else own
    return [states for states in values if isinstance(states, Tensor)]


def _sum_by_rank(kept: list[Tensor], mixer_heads: MixerHeads, size: int) -> tuple[int, ...]:
    """Bytes of states `(batch, heads or channels, ...)` on every rank."""
    splits = [mixer_heads.convolved, mixer_heads.heads] if mixer_heads.splits else []
    totals = [0] * size
    for states in kept:
        length = states.shape[1]
        split = next((option for option in splits if option is not None and length % option.length == 0), None)
        for rank in range(size):
            totals[rank] += states.nbytes if split is None else states.nbytes // split.length * split.widths[rank]
    return tuple(totals)
