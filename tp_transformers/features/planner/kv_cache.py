"""Memory of the KV cache per head: transformers' cache, filled on the meta device.

The cache of transformers decides which tokens a layer keeps: all, a window, or none if it uses another layer's. Here
it is filled with tensors of one head on the meta device, and measured.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ...anatomy import CACHES, HEAD_SIZES, features, first_of, head_counts, is_attention, is_cross_attention
from ...errors import PlanError
from ...plans.attention import AttentionHeads

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
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not any(map(is_attention, decoder.modules())):  # the output layer of ModernBERT's decoder has that name
        decoder = model
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    for name, module in decoder.named_modules(prefix=prefix):
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
