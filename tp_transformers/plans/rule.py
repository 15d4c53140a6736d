"""Rules: entries of a plan for modules or parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.tensor.parallel import ParallelStyle

from ..strategies import STRATEGIES, ReplicateParallel, TensorParallelLayer, as_strategy
from .pattern import Pattern

UNRULED: TensorParallelLayer = ReplicateParallel()
"""Strategy of a module without a rule."""


@dataclass(frozen=True)
class Rule(Pattern):
    """One line of a plan: the modules or parameters that match `pattern` are sharded by `strategy`."""

    strategy: str | ParallelStyle
    """Name of a strategy, a strategy object, or a ParallelStyle of torch, which is converted to a strategy."""
    parts: int | str | tuple[int | str, ...] | None = None
    """Parts of a fused projection: the number of equal parts, the module attribute with that number, or the length or
    role of each part."""
    unit: int | None = None
    """Number of consecutive indices that stay on one rank."""
    widths: tuple[str, ...] = ()
    """Width attributes of the module; during its forward they hold the width of this rank's shard."""
    optional: bool = False
    implied: str = field(default="", compare=False)
    """Section of the plan with the entry that implies this rule; explicit rules take precedence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", as_strategy(self.strategy))

    @property
    def strategy_name(self) -> str:
        return self.strategy if isinstance(self.strategy, str) else repr(self.strategy)

    @property
    def instance(self) -> TensorParallelLayer | None:
        """The strategy object; None if there is none of that name."""
        return STRATEGIES.find(self.strategy) if isinstance(self.strategy, str) else as_strategy(self.strategy)
