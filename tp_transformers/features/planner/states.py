"""Memory of the states that mixers keep instead of keys and values, measured on the meta device.

A mixer computes a few tokens on the meta device; then the states in its cache, or in the mixer itself, are measured. A
rank holds the states of its heads.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ...anatomy import CACHES, layer_number
from ...errors import error_text, shorten
from ...plans.rule import SplitHeads
from ..mixers.mixer import MixerHeads

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
