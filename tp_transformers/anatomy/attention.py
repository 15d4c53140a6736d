"""Attention: predicates for each kind of attention module, their configs, and their numbers of heads.

transformers' attention modules have no common base class: they are recognised by class name, attributes and config.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = -3
"""The dim of the heads: (batch, heads, queries, keys), of local attention (batch, blocks, heads, queries, keys)."""
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
"""Attributes of transformers' attention modules, or of their configs, with counts and sizes of heads."""


def is_attention(module: nn.Module) -> bool:
    """True for attention, and for a layer that contains it, as in T5; see `is_around_attention`."""
    return "Attention" in type(module).__name__


def is_cross_attention(name: str) -> bool:
    """True for the name of cross-attention: EncDecAttention, encoder_attn, crossattention.self, or .attention."""
    *around, own = name.lower().split(".")
    if own in ("self", "attention") and around and "att" in around[-1]:
        own = around[-1]
    return "cross" in own or own.startswith("enc")


def attention_config(module: nn.Module, model: PreTrainedModel) -> Any:
    """The config with the head counts of an attention module: its own, or the model's text config."""
    return getattr(module, "config", None) or model.config.get_text_config()


def config_around(modules: Mapping[str, nn.Module], name: str) -> Any:
    """The config of the module `name`, or of the nearest module around it with a config.

    Strategies are bound to this config. `modules` are all modules of the model.
    """
    while name and not hasattr(modules[name], "config"):
        name = name.rpartition(".")[0]
    return modules[name].config


def head_counts(module: nn.Module, config: Any) -> tuple[int, int]:
    """(query heads, KV heads) from a module's attributes or its config; 0 if neither has them."""
    query = first_of(QUERY_COUNTS, module, config) or 0
    return query, first_of(KV_COUNTS, module, config) or query


def reads_counts_of_config(module: nn.Module) -> bool:
    """True if the forward of an attention module may read a head count from its config, as Moonshine's does."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not {"num_attention_heads", *KV_COUNTS}.isdisjoint(code.co_names)


def first_of(names: tuple[str, ...], *owners: Any) -> int | None:
    """The first positive integer among the attributes `names` of the first of `owners` that has one."""
    values = (_get(owner, name) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # a config with different layers raises for fields that differ between them
        return None
