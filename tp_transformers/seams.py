"""Seams of the core: a feature is a folder of `features/`, and its `feature.py` says what it adds.

The core asks all features, and imports none by name: without its folder, a feature is not there, and nothing else ends.
A method of `Feature` exists for what at least two features add, or the core itself uses.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .loading.storage import Storage

FOLDER = Path(__file__).with_name("features")


class Planner(NamedTuple):
    """A way to make a plan for a model: a value of `tp_plan` beside "auto"."""

    make: Callable[[PreTrainedModel, int], Mapping[str, Any]]
    """(model on the meta device, number of ranks) -> plan, as in a YAML file. The first rank alone calls it."""
    advice: str
    """What the error of an architecture without a plan says of this way."""


class Feature:
    """What one feature adds to the core. Each method returns what is added; a method of this class adds nothing.

    `feature.py` is imported with the core and imports only this module at its top; a method imports what it returns, so
    that a feature is imported when it is first used.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Features that this one imports, by their folders."""

    def commands(self) -> Mapping[str, ModuleType]:
        """Commands of `tp-transformers`: name -> module with SUMMARY, EXAMPLE, `configure(parser)` and
        `run(arguments) -> exit code`. Such a module imports neither torch nor transformers before it runs."""
        return {}

    def planners(self) -> Mapping[str, Planner]:
        """Values of `tp_plan`: name -> the way to make a plan."""
        return {}

    def storages(self) -> Sequence[type[Storage]]:
        """Storages of weights; a load asks them in this order."""
        return ()


@cache
def features() -> Mapping[str, Feature]:
    """All features by the names of their folders, those that a feature requires before the feature.

    A feature without those that it requires is left out.
    """
    left = {name: _feature(name) for name in sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))}
    ordered: dict[str, Feature] = {}
    while ready := [name for name, feature in left.items() if ordered.keys() >= set(feature.requires)]:
        ordered |= {name: left.pop(name) for name in ready}
    return ordered


def _feature(name: str) -> Feature:
    feature: Feature = import_module(f".features.{name}.feature", __package__).FEATURE
    return feature
