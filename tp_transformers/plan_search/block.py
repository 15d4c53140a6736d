"""Blocks of an architecture: rules of modules that are sharded together, or the reason why a block is replicated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = ("attention", "mixer", "experts", "mlp", "vocabulary")


class Refused(Exception):  # noqa: N818 - no error: such a block is replicated
    """The reason why a block is replicated."""


@dataclass
class Block:
    """Rules of modules that are sharded together: one kind of attention, mixer, MLP, experts, or the vocabulary."""

    kind: str
    """One of KINDS."""
    name: str
    """Folded name of the module around it, in the full model."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Folded name in the full model -> the rule, as in YAML; None where `roles` say it."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Role -> children of attention; role -> child -> its parts, for a mixer."""
    heads: tuple[int, int] | None = None
    """Query and KV heads of attention in the small model."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Folded name -> assumption that its rule rests on."""
