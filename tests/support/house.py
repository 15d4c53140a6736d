"""Core and features of the package: `python -m tests.support.house` prints their lines and the figures of the whole.

A module in `features/NAME/` is of that feature, as is a module that `tests/data/features.json` names; all others are of
the core, which every user needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path

from tests.support.imports import Imports
from tp_transformers import seams

FEATURES = Path(__file__).parents[1] / "data" / "features.json"
"""{feature: its modules, dotted and relative to the package}."""
ROOT = FEATURES.parents[2]
COMMON = {
    "activations",
    "architectures",
    "clients",
    "debug",
    "env",
    "invariant",
    "machines",
    "packed",
    "partition",
    "places",
    "planner",
    "run",
    "sequence",
    "shares",
    "watch",
}
"""Names of features that are also words of the core."""
Edge = tuple[str, str]
"""(module, module that it imports)."""
Figures = dict[str, object]
"""{name of a figure: figure}, in the order of the table."""


class House:
    """Modules of the package by the feature that each serves."""

    def __init__(self) -> None:
        """Read the modules, their imports, and the features."""
        self.imports = Imports()
        features: dict[str, list[str]] = json.loads(FEATURES.read_text())
        self.feature_of = {module: feature for feature, modules in features.items() for module in modules}
        inside = [module.split(".") for module in self.imports.files if module.startswith("features.")]
        self.feature_of |= {".".join(parts): parts[1] for parts in inside}

    @property
    def unknown(self) -> set[str]:
        """Modules of features that do not exist."""
        return self.feature_of.keys() - self.imports.files.keys()

    @cached_property
    def edges(self) -> list[Edge]:
        """Imports of a module of another feature, by the core and by features."""
        return [
            (name, target)
            for name, targets in self.imports.of_module.items()
            for target in sorted(targets & self.feature_of.keys())
            if self.feature_of.get(name) != self.feature_of[target]
        ]

    @property
    def from_core(self) -> list[Edge]:
        """Imports of features by the core."""
        return [edge for edge in self.edges if edge[0] not in self.feature_of]

    @property
    def between_features(self) -> list[Edge]:
        """Imports of one feature by another that does not require it."""
        return [edge for edge in self.edges if edge[0] in self.feature_of and not self._is_declared(edge)]

    @property
    def declared(self) -> list[Edge]:
        """Imports of one feature by another that requires it."""
        return list(filter(self._is_declared, self.edges))

    def _is_declared(self, edge: Edge) -> bool:
        feature = seams.features().get(self.feature_of.get(edge[0], ""))
        return feature is not None and self.feature_of[edge[1]] in feature.requires

    def lines(self, feature: str | None = None) -> int:
        """Lines of the modules of a feature; of the core without one."""
        return sum(count for name, count in self.imports.lines.items() if self.feature_of.get(name) == feature)

    @cached_property
    def naming(self) -> list[str]:
        """Lines of the core that name a feature: "module:line"."""
        words = set(seams.features()) - COMMON
        for feature in seams.features().values():
            words |= {option.argument for option in feature.options}
            words |= {path.rpartition(".")[2] for path in feature.public} - COMMON
        found = re.compile(rf"\b({'|'.join(sorted(words))})\b").search
        core = ((name, path) for name, path in self.imports.files.items() if name not in self.feature_of)
        lines = ((name, *each) for name, path in core for each in enumerate(path.read_text().splitlines(), 1))
        return [f"{name}:{number}" for name, number, line in lines if found(line)]

    def figures(self) -> Figures:
        """Lines of each feature, and the figures of the sources of the whole."""
        pages = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
        return {
            **{name: self.lines(name) for name in dict.fromkeys(self.feature_of.values())},
            "lines of the core": self.lines(),
            "lines of the package": sum(self.imports.lines.values()),
            **{f"lines of the {name}": _lines(ROOT / name) for name in ("tests", "benchmarks")},
            "words of all pages": sum(len((ROOT / page).read_text().split()) for page in pages.stdout.splitlines()),
            "imports of features by the core": len(self.from_core),
            "imports of features by features that do not require them": len(self.between_features),
            "imports of features by features that require them": len(self.declared),
            "lines of the core that name a feature": len(self.naming),
        }


def imported() -> list[str]:
    """Modules of the package that `enable()` imports, in a new process."""
    program = "import sys, tp_transformers; tp_transformers.enable(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split() if name.partition(".")[0] == "tp_transformers"]


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    """Print all figures, with that of an `enable()`."""
    figures: Figures = {**House().figures(), "modules that `enable()` imports": len(imported())}
    print(
        "| feature, figure | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in figures.items()),
        sep="\n",
    )


if __name__ == "__main__":
    main()
