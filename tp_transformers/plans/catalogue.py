"""Plans that ship with the package: their paths, and the releases of transformers that they are tested with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .yaml_file import model_types_of


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
    """Plans by model type, as in `available_plans`, and by file name."""
    return {**{path.stem: path for path in available_plans().values()}, **available_plans()}
