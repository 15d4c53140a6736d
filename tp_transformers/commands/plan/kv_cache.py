"""What keys and values of every attention cost in memory, a head: transformers' own cache, filled on the meta device.

The cache of transformers decides which layer keeps what (all tokens, a window, nothing since another layer's are used);
here it is filled with tensors that have no data, of one head, and measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, DynamicLayer

from ...anatomy.attention import cached_widths, is_around_attention, is_attention, is_cross_attention
from ...plans.heads import AttentionHeads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CachedAttention:
    """What one attention module keeps of the tokens that it has seen."""

    name: str
    heads: int
    """Heads of which it keeps keys and values, in the whole model."""
    tokens: int
    """Tokens of each sequence that memory holds them of."""
    head_bytes: int
    """Bytes of the keys and values of one head, of the whole batch."""

    def widths(self, heads: AttentionHeads | None, size: int) -> tuple[int, ...]:
        """How many heads each of `size` ranks keeps, its attention being cut as `heads`; None: not at all."""
        cuts = (heads.kv, heads.query) if heads is not None else ()
        return next((cut.widths for cut in cuts if cut.length == self.heads), (self.heads,) * size)


def cached_attention(
    model: PreTrainedModel, *, batch: int, context: int, encoder_context: int | None = None
) -> list[CachedAttention]:
    """What the attention of `model` keeps once a batch is `context` tokens long, the last of which came alone.

    Args:
        model: any transformers model; the meta device will do. One that caches nothing has nothing here.
        batch: number of sequences.
        context: tokens of each.
        encoder_context: tokens that an encoder has seen, for attention to them; None for as many.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    found = []
    for name, module in decoder.named_modules(prefix=prefix):
        index = getattr(module, "layer_idx", None)
        if not is_attention(module) or not isinstance(index, int) or is_around_attention(module):
            continue
        # What has no layer attends to what an earlier one keeps, or keeps no keys and values.
        if index >= len(layers) or not isinstance(layers[index], DynamicLayer):
            continue
        if is_cross_attention(name):
            steps = [context if encoder_context is None else encoder_context]
        else:
            steps = [context - 1, 1]
        heads, *widths = cached_widths(module, getattr(module, "config", None) or config)
        head_bytes = _fill(layers[index], batch, steps, widths, model.dtype)
        tokens = head_bytes // (batch * sum(widths) * model.dtype.itemsize)
        found.append(CachedAttention(name, heads, tokens, head_bytes))
    return found


def _fill(layer: DynamicLayer, batch: int, steps: Sequence[int], widths: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of memory behind one head's keys and values once `steps` tokens have come, one step after the other."""
    layer = copy.copy(layer)
    for step in filter(None, steps):
        layer.update(*(torch.empty(batch, 1, step, width, dtype=dtype, device="meta") for width in widths))
    return sum(tensor.untyped_storage().nbytes() for tensor in (layer.keys, layer.values))
