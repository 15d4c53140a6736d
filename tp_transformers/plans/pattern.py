"""Patterns: names of a plan; a star stands for a layer number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pattern:
    """A name in a model; `*` stands for a layer number."""

    pattern: str
    in_base_model: bool = field(default=False, kw_only=True)
    """True for a name that counts from the base model rather than from the full one."""

    def full(self, base_model_prefix: str) -> str:
        """The pattern, counted from the full model."""
        return ".".join(filter(None, (base_model_prefix if self.in_base_model else "", self.pattern)))

    def match(self, names: Iterable[str], base_model_prefix: str) -> Iterator[str]:
        """The names that match as a whole."""
        expression = r"\d+".join(map(re.escape, self.full(base_model_prefix).split("*")))
        matches = re.compile(expression).fullmatch
        return (name for name in names if matches(name))
