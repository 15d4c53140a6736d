"""Plans: the sharding of an architecture, one rule per kind of module. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespaces import lazy_names

if TYPE_CHECKING:
    from .attention import Attention
    from .rule import Rule
    from .rules import Plan
else:
    __getattr__, __dir__ = lazy_names(__name__, {"attention": "Attention", "rule": "Rule", "rules": "Plan"})

__all__ = ["Attention", "Plan", "Rule"]
