"""Rules: entries of a plan for modules or parameters, by patterns of names; `*` matches a layer number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.distributed.tensor.parallel import ParallelStyle

from ..strategies import STRATEGIES, ReplicateParallel, TensorParallelLayer, as_strategy

UNRULED: TensorParallelLayer = ReplicateParallel()
"""Strategy of a module without a rule."""


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
