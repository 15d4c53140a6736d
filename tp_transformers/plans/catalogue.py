"""The plans that ship with the package: where they are, and the releases that they were proven with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .yaml_file import model_types_of

PROVEN_WITH = ("5.6.2", "5.17.0", "5.23.0")
"""The releases of transformers that CI proves every plan with, against one process, from the oldest to the newest.

A few model types take a part of their heads, or have the names of their plan, from a later release on, which `since` in
tests/support/tiny.py has; before it a load names the misfit. A test compares this with CI."""


@cache
def available_plans() -> Mapping[str, Path]:
    """The plans that ship with the package: {model_type: YAML file}."""
    package = Path(__file__).parents[1]
    wheel, checkout = package / "model_plans", package.parent / "model_plans"
    plans: dict[str, Path] = {}
    for path in sorted((wheel if wheel.is_dir() else checkout).glob("*.yaml")):
        plans.update(dict.fromkeys(model_types_of(path), path))
    return MappingProxyType(plans)


def plan_names() -> Mapping[str, Path]:
    """The plans by all their names: those of `available_plans`, and the names of their files."""
    return {**{path.stem: path for path in available_plans().values()}, **available_plans()}
