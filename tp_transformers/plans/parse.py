"""Parser of plans: from the content of a YAML file, or a dict, to rules and a list of faults.

`model_plans/README.md` describes the format; `model_plans/llama.yaml` is an example.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import PlanError, nearest, shorten, shown
from ..seams import options as load_options
from ..strategies import TensorParallelLayer, as_strategy
from .rule import Rule

DECLARED = "declared"
"""Value of `extends` for the plan that the model's class declares."""

IN_BASE_MODEL = ("base_model", "optional")
RULE_OPTIONS = ("strategy", "parts", "unit", "widths")
RULES = (*IN_BASE_MODEL, "heads", "rules")
"""Sections of rules."""

MAX_NAME = 500
"""Maximum characters of a name."""


def check_sections(data: Any, source: str, entries: Iterable[str]) -> list[str]:
    """List the faults of a plan's sections; `entries`: sections beside those of rules.

    Raises PlanError if `data` is not a mapping.
    """
    sections = ("model_type", "extends", *RULES, *entries)
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        expected, fix = f"a mapping of {', '.join(sections)}", "See model_plans/llama.yaml for one."
        raise PlanError(f"plan {shorten(source, 200)}", got=got, expected=expected, fix=fix)
    arguments = {option.name: option.argument for option in load_options()}
    unknown = [key for key in data if not (isinstance(key, str) and key in (*sections, *arguments))]
    hint = nearest(unknown[0], sections) if unknown and is_name(unknown[0]) else ""
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    faults = [f"unknown section {shown(key)}{hint}{more}; sections are {', '.join(sections)}" for key in unknown[:1]]
    faults += [
        f"{key} is no section; pass {argument}={shown(data[key])} to from_pretrained"
        for key, argument in arguments.items()
        if key in data
    ]
    return faults


def entries(data: Mapping[str, Any], section: str, faults: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every line of a section; invalid names are added to `faults`."""
    value = data.get(section)
    if value is not None and not isinstance(value, Mapping):
        faults.append(f"section {section} is a {type(value).__name__}, not a mapping of names")
        return
    for name, entry in (value or {}).items():
        if is_name(name):
            yield name, entry
        else:
            kind = "is no text; put it in quotes" if not isinstance(name, str) else "is no name of a module"
            faults.append(f"section {section}: the name {shown(name)} {kind}")


def is_name(value: Any) -> bool:
    """True for printable text of at most MAX_NAME characters, which can name a module."""
    return isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()


def is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_name, value))


def names_of(value: Any) -> tuple[str, ...] | None:
    """A list of names, or a single name, as a tuple; None for anything else."""
    names = (value,) if isinstance(value, str) else value
    return tuple(names) if is_names(names) else None


def parse_rule(pattern: str, value: Any, section: str, faults: list[str]) -> Rule | None:
    """The rule of a line of a section; None, and a fault, for no strategy or an unknown option."""
    options = dict(value) if isinstance(value, Mapping) else {"strategy": value}
    if "input" in options:
        faults.append(f"{pattern}: `input` is no part of a rule; name the module in tp_batch_sharded=[...] instead")
        return None
    if "strategy" not in options or options.keys() - set(RULE_OPTIONS):
        faults.append(
            f"{pattern}: a rule has `strategy` and perhaps `parts`, `unit` and `widths`, not "
            f"[{', '.join(sorted(map(shown, options))[:6])}]"
        )
        return None
    strategy, parts, unit = (options.get(name) for name in ("strategy", "parts", "unit"))
    widths = names_of(options.get("widths") or ())
    if isinstance(parts, list | tuple):
        parts = tuple(parts)
    if parts is not None and not is_parts(parts):
        faults.append(f"{pattern}: parts is {shown(parts)}, neither a number nor a list of lengths or roles")
    if unit is not None and not is_count(unit):
        faults.append(f"{pattern}: unit is {shown(unit)}, not a positive number")
    if widths is None:
        faults.append(f"{pattern}: widths is {shown(options['widths'])}, neither a name nor a list of names")
    strategy = as_strategy(strategy)
    if not (is_name(strategy) or isinstance(strategy, TensorParallelLayer)):
        name = getattr(strategy, "__name__", None)
        text = f"the class {name} (an object is {name}())" if isinstance(strategy, type) else shown(strategy)
        faults.append(
            f"{pattern}: the strategy is {text}, neither a name nor a TensorParallelLayer or ParallelStyle object"
        )
        return None
    is_optional, is_in_base = section in ("optional", "heads"), section in IN_BASE_MODEL
    return Rule(pattern, strategy, parts, unit, widths or (), is_optional, in_base_model=is_in_base)


def is_number(value: Any) -> bool:
    """True for an integer in the range of torch's lengths; it may be negative."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.maxsize


def is_count(value: Any) -> bool:
    return is_number(value) and value > 0


def is_parts(value: Any) -> bool:
    """True for a number of parts, the attribute with that number, or a tuple of numbers and names."""
    if isinstance(value, tuple):
        return all(is_name(part) or is_number(part) for part in value)
    return is_count(value) or (is_name(value) and value.isidentifier())
