"""Entries of a plan: a rule for modules or parameters, and a description of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed.tensor.parallel import ParallelStyle

from ..strategies import STRATEGIES, ReplicateParallel, TensorParallelLayer, as_strategy
from .pattern import Pattern

UNRULED: TensorParallelLayer = ReplicateParallel()
"""Strategy of a module that no rule covers."""


@dataclass(frozen=True)
class Rule(Pattern):
    """One line of a plan: the modules or parameters that match `pattern` are split by `strategy`."""

    strategy: str | ParallelStyle
    """A strategy's name, an object of one, or of a style of torch, which becomes a strategy."""
    parts: int | str | tuple[int | str, ...] | None = None
    """Parts of a fused projection: their number, if they are equal, or the attribute of the module that counts them;
    their lengths, or the heads that they hold."""
    unit: int | None = None
    """Indices that stay together on a rank."""
    widths: tuple[str, ...] = ()
    """Attributes of the module that are a width, and that are this rank's part of it in its forward."""
    batch_sharded: bool = False
    """True if every rank has samples of its own, which the module gathers."""
    optional: bool = False
    implied: str = field(default="", compare=False)
    """Section with an entry that implies the rule, for modules without a rule of their own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", as_strategy(self.strategy))

    @property
    def strategy_name(self) -> str:
        return self.strategy if isinstance(self.strategy, str) else repr(self.strategy)

    @property
    def instance(self) -> TensorParallelLayer | None:
        """The strategy itself; None where there is none of that name."""
        return STRATEGIES.find(self.strategy) if isinstance(self.strategy, str) else as_strategy(self.strategy)


@dataclass(frozen=True)
class Attention(Pattern):
    """The modules that match `pattern` attend with heads: their projections are cut by whole heads."""

    children: Mapping[str, tuple[str, ...]]
    """Role (one of ATTENTION_ROLES) -> names of child modules or parameters."""
    optional: bool = False
    gathered: bool = False
    """True if projections are cut, but their outputs gathered, so that every rank computes with all heads."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Role -> blocks of heads, stored one after the other; a rank has a share of each."""
