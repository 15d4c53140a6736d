"""Lines of a plan: rules for modules or parameters, and entries of sections that describe modules, such as attention.

A line names modules by a pattern; `*` matches a layer number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..strategies import STRATEGIES, ReplicateParallel, TensorParallelLayer, as_strategy

if TYPE_CHECKING:
    from ..strategies import ParamShard

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


@dataclass(frozen=True)
class Entry(Pattern):
    """The modules that match `pattern`: their parameters are sharded together."""

    section: ClassVar[str]
    """Name of the section in plan files."""
    optional: bool = field(default=False, kw_only=True)

    @classmethod
    def parse(cls, pattern: str, value: Any, faults: list[str]) -> Entry:
        """Make an entry from a line of the section; faults of the line are added to `faults`."""
        raise NotImplementedError

    def rules(self) -> Iterator[Rule]:
        """The rules that the entry implies, for modules without explicit rules."""
        raise NotImplementedError


class SplitHeads:
    """Splits of the heads of one module."""

    def count(self, model: nn.Module, name: str, rank: int) -> None:
        """Set the head counts of `rank` on the module `name` of `model`; the shared config does not change."""
        raise NotImplementedError

    def attach(self, model: nn.Module, name: str, shards: Mapping[str, ParamShard], rank: int) -> None:
        """Change the forward of the module `name`, after its strategies are attached; `shards`: of all parameters."""


def set_own(module: nn.Module, attributes: Mapping[str, int]) -> None:
    """Set the attributes that the module has."""
    for name, value in attributes.items():
        if hasattr(module, name):
            setattr(module, name, value)
