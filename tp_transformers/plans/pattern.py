"""Patterns: names in a plan; `*` matches a layer number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pattern:
    """A name in a model; `*` matches a layer number."""

    pattern: str
    in_base_model: bool = field(default=False, kw_only=True)
    """True if the name is relative to the base model, not the full model."""

    def full(self, base_model_prefix: str) -> str:
        """The pattern relative to the full model."""
        return ".".join(filter(None, (base_model_prefix if self.in_base_model else "", self.pattern)))

    def match(self, names: Iterable[str], base_model_prefix: str) -> Iterator[str]:
        """Yield the names that match completely."""
        expression = r"\d+".join(map(re.escape, self.full(base_model_prefix).split("*")))
        matches = re.compile(expression).fullmatch
        return (name for name in names if matches(name))
