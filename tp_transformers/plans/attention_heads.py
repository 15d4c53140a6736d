"""Splits of attention's heads, of one module and of a model, and the head counts of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..anatomy.attention import KV_COUNTS, QUERY_COUNTS, reads_counts_of_config
from ..slices.layout import Split, packed
from ..strategies import LocalConfig


@dataclass(frozen=True)
class AttentionHeads:
    """How the heads of one attention module are cut."""

    query: Split
    kv: Split
    is_fused: bool = False
    """True if one projection makes queries, keys and values, which the module splits by head counts."""
    is_latent: bool = False
    """True if heads are made from replicated latents (multi-head latent attention)."""
    head_dim: int | None = None
    """Features of a query head, where they are known."""
    repeats: int = 1
    """Times that every query head attends, with queries of its own: once for every expert that a token has in JetMoE.
    """
    holders: tuple[str, ...] = ()
    """Modules in it that hold its projections, and count heads or their features, too."""
    hidden: tuple[str, ...] = ()
    """Modules and parameters in it that compute with hidden states, before or after the heads."""

    @property
    def attended(self) -> Split:
        """How the heads of the attentions that the module returns are cut."""
        return packed([self.query] * self.repeats)

    def attributes(self, rank: int) -> dict[str, int]:
        """The module's own head counts on `rank`, by the names that transformers uses."""
        query, kv = self.query.widths[rank], self.kv.widths[rank]
        counts = {**dict.fromkeys(QUERY_COUNTS, query), **dict.fromkeys(KV_COUNTS, kv)}
        counts["num_key_value_groups"] = query // kv
        if self.head_dim is not None:
            # Names for the width of all query heads, at which GPT-2 and DBRX split queries from keys, and of KV heads.
            widths = ("split_size", "embed_dim", "inner_dim", "all_head_size", "q_dim", "hidden_size")
            counts |= dict.fromkeys(widths, query * self.head_dim)
            counts["kv_dim"] = kv * self.head_dim
        return counts

    def config_attributes(self, rank: int) -> dict[str, int]:
        """The head counts that the module reads from its config on `rank`."""
        counts = self.attributes(rank)
        return {name: counts[name] for name in ("num_attention_heads", *KV_COUNTS)}


@dataclass
class AttentionCut:
    """How all attention of a model is cut."""

    heads: dict[str, AttentionHeads] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)
    """Projection, parameter or attention module -> how its heads are cut."""
    whole: dict[str, str] = field(default_factory=dict)
    """Replicated child (there are more ranks than heads) -> its attention module or mixer."""


def count_heads(model: nn.Module, name: str, heads: AttentionHeads, rank: int) -> None:
    """Give the attention `name` of `model` the head counts of `rank`; the shared config stays as it is."""
    module: Any = model.get_submodule(name)
    for holder in (name, *heads.holders):
        set_own(model.get_submodule(holder), heads.attributes(rank))
    if hasattr(module, "config") and (heads.is_fused or reads_counts_of_config(module)):
        module.config = LocalConfig(module.config, **heads.config_attributes(rank))


def set_own(module: nn.Module, attributes: Mapping[str, int]) -> None:
    """Set those attributes that the module has."""
    for name, value in attributes.items():
        if hasattr(module, name):
            setattr(module, name, value)
