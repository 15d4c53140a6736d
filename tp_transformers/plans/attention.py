"""The section `attention` of a plan, and the heads of one attention module: sharded by complete heads, and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..anatomy import KV_COUNTS, QUERY_COUNTS, reads_counts_of_config
from ..errors import shown
from ..marks import untyped
from ..slices.layout import Split, packed
from ..strategies import LocalConfig
from .parse import names_of
from .rule import Entry, Rule, SplitHeads, set_own

ROLES = (
    *("query", "key", "value", "key_value", "fused", "interleaved", "output"),
    *("with_query", "with_key", "with_hidden"),
)
"""Roles of an attention module's children; see `model_plans/README.md`."""
FLAGS = ("optional", "gathered")
"""Boolean fields of an attention module's entry."""

IMPLIED: Mapping[str, Any] = {
    "query": "colwise",
    "key": "colwise",
    "value": "colwise",
    "key_value": "colwise",
    "fused": {"strategy": "packed_colwise", "parts": ("query", "key", "value")},
    "interleaved": "colwise",
    "output": "rowwise",
}
"""Rules of an attention module's projections, by role, unless the plan has rules for them."""
IMPLIED_GATHERED: Mapping[str, Any] = {role: "rowwise_rep" if role == "output" else "colwise_rep" for role in IMPLIED}
"""The same for attention that gathers: every rank computes with all heads."""


@dataclass(frozen=True)
class Attention(Entry):
    """Attention modules that match `pattern`: their projections are sharded by complete heads."""

    section = "attention"
    children: Mapping[str, tuple[str, ...]]
    """Role (one of ROLES) -> names of child modules or parameters."""
    gathered: bool = field(default=False, kw_only=True)
    """True if projections are sharded and their outputs gathered, so that every rank computes with all heads."""
    blocks: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    """Role -> number of blocks of heads, stored one after the other; each block is sharded."""

    @classmethod
    def parse(cls, pattern: str, value: Any, faults: list[str]) -> Attention:
        options = dict(value) if isinstance(value, Mapping) else {}
        flags = {name: options.pop(name, False) for name in FLAGS}
        faults.extend(
            f"attention {pattern}: {name} is {shown(flag)}, not true or false"
            for name, flag in flags.items()
            if not isinstance(flag, bool)
        )
        blocks = options.pop("blocks", {})
        roles = {role: names_of(names or ()) for role, names in options.items()}
        if not isinstance(blocks, Mapping) or blocks.keys() - roles.keys() or len({1, *blocks.values()}) > 2:
            faults.append(f"attention {pattern}: blocks is {shown(blocks)}, not one number for some of its roles")
            blocks = {}
        if not roles or None in roles.values() or roles.keys() - set(ROLES):
            faults.append(f"attention {pattern}: {shown(value)} does not map {', '.join(ROLES)} to child names")
        children = {role: names or () for role, names in roles.items()}
        is_set = {name: bool(flag) for name, flag in flags.items()}
        return cls(pattern, children, blocks=blocks, in_base_model=True, **is_set)

    def rules(self) -> Iterator[Rule]:
        for role, value in (IMPLIED_GATHERED if self.gathered else IMPLIED).items():
            options = value if isinstance(value, Mapping) else {"strategy": value}
            for child in self.children.get(role, ()):
                yield Rule(f"{self.pattern}.{child}", **options, optional=True, in_base_model=True)


@dataclass(frozen=True)
class AttentionHeads(SplitHeads):
    """Splits of the heads of one attention module."""

    query: Split
    kv: Split
    is_fused: bool = False
    """True if one projection makes queries, keys and values; the module separates them by head counts."""
    is_latent: bool = False
    """True if heads are projected from replicated latents (multi-head latent attention)."""
    head_dim: int | None = None
    """Features of a query head; None if unknown."""
    repeats: int = 1
    """Times that every query head attends, each with separate queries: once per expert of a token in JetMoE."""
    holders: tuple[str, ...] = ()
    """Submodules that hold its projections; their head counts and widths are set, too."""
    hidden: tuple[str, ...] = ()
    """Submodules and parameters that compute with hidden states, before or after the heads."""

    @property
    def attended(self) -> Split:
        """Split of the heads in the attention weights that the module returns."""
        return packed([self.query] * self.repeats)

    def attributes(self, rank: int) -> dict[str, int]:
        """Local head counts and widths on `rank`, by their attribute names in transformers."""
        query, kv = self.query.widths[rank], self.kv.widths[rank]
        counts = {**dict.fromkeys(QUERY_COUNTS, query), **dict.fromkeys(KV_COUNTS, kv)}
        counts["num_key_value_groups"] = query // kv
        if self.head_dim is not None:
            # Widths of all query heads (GPT-2 and DBRX split queries from keys at this offset) and of all KV heads.
            widths = ("split_size", "embed_dim", "inner_dim", "all_head_size", "q_dim", "hidden_size")
            counts |= dict.fromkeys(widths, query * self.head_dim)
            counts["kv_dim"] = kv * self.head_dim
        return counts

    def count(self, model: nn.Module, name: str, rank: int) -> None:
        module, counts = untyped(model.get_submodule(name)), self.attributes(rank)
        for holder in (name, *self.holders):
            set_own(model.get_submodule(holder), counts)
        if hasattr(module, "config") and (self.is_fused or reads_counts_of_config(module)):
            of_config = {attribute: counts[attribute] for attribute in ("num_attention_heads", *KV_COUNTS)}
            module.config = LocalConfig(module.config, **of_config)
