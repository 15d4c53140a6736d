"""Entries of the sections of a plan that describe modules, such as attention, whose heads are split over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ..slices.layout import Ranks, Split
from .rule import Pattern, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..strategies import ParamShard


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

    def rules(self) -> Iterator[dict[str, Any]]:
        """Arguments of the rules that the entry implies, for modules without explicit rules."""
        raise NotImplementedError

    @classmethod
    def split(cls, matches: Matches) -> Mapping[str, SplitHeads]:
        """Split the heads of the modules of this section: module -> its heads.

        Adds the splits of children to `matches`, before rules are bound; may complete or replace the rules there.
        """
        raise NotImplementedError


class SplitHeads:
    """Splits of the heads of one module."""

    def count(self, model: nn.Module, name: str, rank: int) -> None:
        """Set the head counts of `rank` on the module `name` of `model`; the shared config does not change."""
        raise NotImplementedError

    def attach(self, model: nn.Module, name: str, shards: Mapping[str, ParamShard], rank: int) -> None:
        """Change the forward of the module `name`, after its strategies are attached; `shards`: of all parameters."""


@dataclass
class Matches:
    """A plan, with the modules and parameters of a model that its rules match."""

    entries: Sequence[Entry]
    inner_model_around: Callable[[str], str]
    """Of `Plan`."""
    declared: bool
    """True for a plan that a transformers class declares."""
    model: PreTrainedModel
    prefix: str
    ranks: Ranks
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    module_rules: dict[str, Rule]
    param_rules: dict[str, Rule]
    """Parameter -> its own rule."""
    faults: list[str]
    splits: dict[str, Split] = field(default_factory=dict)
    """Projection, parameter or attention module -> split of its heads or features."""
    replicated: dict[str, str] = field(default_factory=dict)
    """Child that is replicated because there are more ranks than heads -> the module whose heads they are."""


def set_own(module: nn.Module, attributes: Mapping[str, int]) -> None:
    """Set the attributes that the module has."""
    for name, value in attributes.items():
        if hasattr(module, name):
            setattr(module, name, value)
