"""Catalogue of the plans that ship with the package: the table of the README and of `tp-transformers plans`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import PlanError
from ...plans.rules import Plan
from ...plans.yaml_file import available_plans


@dataclass(frozen=True)
class Entry:
    title: str
    url: str
    file: Path
    model_types: tuple[str, ...]
    strategies: tuple[str, ...]
    """Sorted names of the strategies that its rules use."""


def catalogue() -> list[Entry]:
    """List every plan by file name. Raises PlanError if a file does not begin with its title and its URL."""
    entries = []
    for path in sorted(set(available_plans().values())):
        plan = Plan.from_yaml(path)
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        match = re.fullmatch(r"# (.+?): (https://\S+)", first)
        if match is None:
            fix = "Begin the file with its title and a page about it."
            raise PlanError(f"plan {path}", got=repr(first), expected="# Title: https://...", fix=fix)
        strategies = tuple(sorted({rule.strategy_name for rule in plan.rules}))
        entries.append(Entry(match[1], match[2], path, plan.model_types, strategies))
    return entries
