"""Plans as data: YAML -> what rules are made of, and every fault of the form.

`model_plans/README.md` describes the format; `model_plans/llama.yaml` is an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import PlanError, describe, nearest
from ..strategies import TensorParallelLayer, as_strategy

BATCH_SHARDED_INPUT = "batch-sharded"
"""Layout, in a rule, of an input of which every rank has samples of its own."""

ATTENTION_ROLES = ("query", "key", "value", "key_value", "fused", "interleaved", "output", "with_query", "with_key")
"""Roles of an attention module's children; see `model_plans/README.md`."""

OPTIONS = ("sequence_parallel", "loss_parallel")
IN_BASE_MODEL = ("base_model", "optional")
SECTIONS = ("model_type", "extends", *IN_BASE_MODEL, "heads", "rules", "attention", "batch_sharded", *OPTIONS)


def read_plan_file(path: Path) -> Any:
    """The data of a plan's YAML file. Raises PlanError where it cannot be read, or is not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        got, fix = (error.strerror or str(error)).lower(), 'Correct the path, or pass tp_plan="auto".'
        raise PlanError(describe(f"plan {path}", got=got, expected="a YAML file", fix=fix)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"plan {path} is not YAML: {error}") from error


def model_types_of(path: Path) -> tuple[str, ...]:
    """The model types that a plan's YAML file is for."""
    found = yaml.load(path.read_text(encoding="utf-8"), Loader=_SafeLoader)["model_type"]
    return (found,) if isinstance(found, str) else tuple(found)


def check_sections(data: Any, source: str) -> list[str]:
    """Faults of the sections of a plan. Raises PlanError where it has none, not being a mapping."""
    if not isinstance(data, Mapping):
        got, expected = f"a {type(data).__name__}", f"a mapping of {', '.join(SECTIONS)}"
        fix = "See model_plans/llama.yaml for one."
        raise PlanError(describe(f"plan {source}", got=got, expected=expected, fix=fix))
    return [
        f"unknown section {key!r}{nearest(str(key), SECTIONS)}; sections are {', '.join(SECTIONS)}"
        for key in data
        if key not in SECTIONS
    ]


def mapping_of(data: Mapping[str, Any], section: str, faults: list[str]) -> Mapping[Any, Any]:
    value = data.get(section) or {}
    if isinstance(value, Mapping):
        return value
    faults.append(f"section {section} is a {type(value).__name__}, not a mapping of names")
    return {}


def is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def rule_arguments(pattern: str, value: Any, section: str, faults: list[str]) -> dict[str, Any] | None:
    """The arguments of `Rule` for a line of a section; None, and a fault, where there is no strategy."""
    options = dict(value) if isinstance(value, Mapping) else {"strategy": value}
    layout = options.pop("input", None)
    if layout is not None:
        options.setdefault("strategy", "replicate")  # its inner rules cut
    if layout not in (None, BATCH_SHARDED_INPUT):
        faults.append(f"{pattern}: unknown layout {layout!r} of the input; the only one is {BATCH_SHARDED_INPUT}")
    if "strategy" not in options or set(options) - {"strategy", "parts", "unit", "widths"}:
        given = sorted(map(str, options))
        faults.append(
            f"{pattern}: a rule has `strategy` and perhaps `parts`, `unit`, `widths` and `input`, not {given}"
        )
        return None
    strategy, parts, unit = (options.get(name) for name in ("strategy", "parts", "unit"))
    widths = options.get("widths") or ()
    if isinstance(parts, list | tuple):
        parts = tuple(parts)
    elif parts is not None and not isinstance(parts, int):
        faults.append(f"{pattern}: parts is {parts!r}, neither a number nor a list")
    if unit is not None and not (isinstance(unit, int) and unit > 0):
        faults.append(f"{pattern}: unit is {unit!r}, not a positive number")
    if not isinstance(as_strategy(strategy), str | TensorParallelLayer):
        name = getattr(strategy, "__name__", None)
        found = f"the class {name} (an object is {name}())" if isinstance(strategy, type) else repr(strategy)
        faults.append(
            f"{pattern}: the strategy is {found}, neither a name nor a TensorParallelLayer or ParallelStyle object"
        )
        return None
    return {
        "pattern": pattern,
        "strategy": as_strategy(strategy),
        "parts": parts,
        "unit": unit,
        "widths": (widths,) if isinstance(widths, str) else tuple(map(str, widths)),
        "batch_sharded": layout is not None,
        "optional": section in ("optional", "heads"),
        "in_base_model": section in IN_BASE_MODEL,
    }


def attention_arguments(pattern: str, children: Any, faults: list[str]) -> dict[str, Any]:
    """The arguments of `Attention` for a line of the section `attention`."""
    options = dict(children) if isinstance(children, Mapping) else {}
    optional = options.pop("optional", False)
    roles = {role: (names,) if isinstance(names, str) else tuple(names or ()) for role, names in options.items()}
    if not roles or not set(roles) <= set(ATTENTION_ROLES):
        faults.append(f"attention {pattern}: {children!r} does not map {', '.join(ATTENTION_ROLES)} to child names")
    return {"pattern": pattern, "children": roles, "optional": bool(optional), "in_base_model": True}


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where PyYAML was built with it


class _UniqueKeyLoader(_SafeLoader):
    """A loader that refuses two rules of one name, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands there twice", node.start_mark)
        return dict(super().construct_mapping(node, deep))
