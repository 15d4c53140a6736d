"""The section `attention` of a plan: the projections of attention modules, which are sharded by complete heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import shown
from .entry import Entry
from .parse import names_of, rule_arguments

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
    "fused": {"strategy": "packed_colwise", "parts": ["query", "key", "value"]},
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

    def rules(self) -> Iterator[dict[str, Any]]:
        for role, strategy in (IMPLIED_GATHERED if self.gathered else IMPLIED).items():
            for child in self.children.get(role) or ():
                yield rule_arguments(f"{self.pattern}.{child}", strategy, "optional", []) or {}
