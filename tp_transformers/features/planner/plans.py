"""`tp-transformers plans`: a list of the architectures with plans."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

from ...errors import PlanError

PROVEN_WITH = ("5.6.2", "5.17.0", "5.23.0")
"""Releases of transformers that CI tests every plan with, against one process, from the oldest to the newest.

A few model types need a later release to run with a shard of their heads, or to have the names of their plan: `since`
in tests/support/tiny.py. With an earlier release, a load reports the misfit. A test compares this list with CI."""


@dataclasses.dataclass(frozen=True)
class Entry:
    title: str
    url: str
    file: Path
    model_types: tuple[str, ...]
    strategies: tuple[str, ...]
    """Sorted names of the strategies that its rules use."""


def catalogue() -> list[Entry]:
    """The plans that ship with the package. Raises PlanError if a file does not begin with its title and its URL."""
    from ...plans.rules import Plan
    from ...plans.yaml_file import available_plans

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


SUMMARY = "list the architectures that there are plans for"
EXAMPLE = "tp-transformers plans --json"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns 0."""
    from .tables import columns, fold, terminal_width

    entries = catalogue()
    if arguments.json:
        plans = [{**dataclasses.asdict(entry), "file": str(entry.file)} for entry in entries]
        print(json.dumps({"version": 1, "proven_with_transformers": list(PROVEN_WITH), "plans": plans}, indent=2))
        return 0
    rows = [(entry.title, ", ".join(entry.model_types), ", ".join(entry.strategies)) for entry in entries]
    width = terminal_width()
    print("\n".join(columns(rows, width=width)))
    proven = f"{len(rows)} plans, each held against one process with transformers {', '.join(PROVEN_WITH)}"
    print("", *fold(proven, width, 0), f"in {entries[0].file.parent}", sep="\n")
    return 0
