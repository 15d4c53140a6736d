"""Blocks of an architecture: modules that are sharded together, with their rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = ("attention", "mixer", "experts", "mlp", "vocabulary")


class Refused(Exception):  # noqa: N818 - no error: such a block is replicated
    """Raised with the reason why a block is replicated."""


@dataclass
class Block:
    """Modules that are sharded together, with their rules: attention, a mixer, an MLP, experts, or the vocabulary."""

    kind: str
    """One of KINDS."""
    name: str
    """Folded name, in the full model, of the module around it."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Folded name in the full model -> the rule, as in YAML; None if `roles` imply it."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Role -> children of attention; role -> child -> its parts, for a mixer."""
    heads: tuple[int, int] | None = None
    """Query and KV heads of attention in the small model."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Folded name -> assumption of its rule."""
