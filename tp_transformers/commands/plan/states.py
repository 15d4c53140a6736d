"""Memory of the states that mixers keep instead of keys and values: transformers' own cache, filled on the meta device.

A mixer computes a few tokens without data, and its cache is measured. The states of a rank are those of its heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...plans.mixers import MixerHeads

TOKENS = 8
"""Tokens that a mixer computes: more than the kernels of convolutions are long, whose states are of one size."""
CACHES = ("cache_params", "past_key_values")
"""Names that mixers have for the argument of their cache."""


@dataclass(frozen=True)
class States:
    """The states that one mixer keeps."""

    name: str
    nbytes: tuple[int, ...] | None
    """Bytes on every rank; None where they are not in a cache of transformers, and not known."""


def mixer_states(
    model: PreTrainedModel, mixers: Mapping[str, MixerHeads], size: int, *, batch: int
) -> Iterator[States]:
    """The states of every mixer for `batch` sequences of any length, on each of `size` ranks.

    Args:
        model: on the meta device.
        mixers: module -> how its heads are cut.
    """
    for name, cut in mixers.items():
        kept = _kept(model, model.get_submodule(name), batch)
        yield States(name, _sum_by_rank(kept, cut, size) if kept else None)


def _kept(model: PreTrainedModel, mixer: nn.Module, batch: int) -> list[Tensor]:
    """The states that one mixer puts into a cache."""
    cache = DynamicCache(config=model.config)
    arguments = inspect.signature(mixer.forward).parameters.values()
    given: dict[str, Any] = {each.name: cache for each in arguments if each.name in CACHES}
    width = model.config.get_text_config(decoder=True).hidden_size
    try:
        with torch.no_grad():
            mixer(torch.empty(batch, TOKENS, width, dtype=model.dtype, device="meta"), **given)
    except Exception:  # its forward wants other arguments
        return []
    found: list[Tensor | None] = []
    for kept in (getattr(layer, kind, None) for layer in cache.layers for kind in ("conv_states", "recurrent_states")):
        found += kept.values() if isinstance(kept, dict) else [kept]  # one tensor in older releases
    return [states for states in found if states is not None]


def _sum_by_rank(kept: list[Tensor], cut: MixerHeads, size: int) -> tuple[int, ...]:
    """Bytes of states `(batch, heads or channels, ...)` on every rank."""
    splits = [cut.convolved, cut.heads] if cut.splits else []
    totals = [0] * size
    for states in kept:
        length = states.shape[1]
        split = next((each for each in splits if each is not None and length % each.length == 0), None)
        for rank in range(size):
            totals[rank] += states.nbytes if split is None else states.nbytes // split.length * split.widths[rank]
    return tuple(totals)
