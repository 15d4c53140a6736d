"""Memory of the KV cache per head: transformers' cache, filled on the meta device.

The cache of transformers decides which tokens a layer keeps: all, a window, or none if it uses another layer's. Here
it is filled with tensors of one head on the meta device, and measured.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from ...anatomy.attention import cache_index, cached_widths, is_around_attention, is_attention, is_cross_attention
from ...plans.attention_heads import AttentionHeads


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
