"""Core and features of the package: `python -m tests.support.house` prints their lines and the imports between them.

A module in `features/NAME/` is of that feature, as is a module that `tests/data/features.json` names; all others are of
the core, which every user needs.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tests.support.imports import Imports
from tp_transformers import seams

FEATURES = Path(__file__).parents[1] / "data" / "features.json"
"""{feature: its modules, dotted and relative to the package}."""
Edge = tuple[str, str]
"""(module, module that it imports)."""


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

    def report(self) -> str:
        """Lines of the core, of each feature and of all, and the counts of the kinds of imports."""
        rows = {"core": self.lines()}
        rows.update({name: self.lines(name) for name in dict.fromkeys(self.feature_of.values())})
        rows["package"] = sum(rows.values())
        table = "\n".join(f"{name:18} {count:6} lines" for name, count in rows.items())
        others = f"{len(self.between_features)} by others, {len(self.declared)} by those that require them"
        counts = f"{len(self.from_core)} by the core, {others}"
        return f"{table}\nimports of features: {counts}"


if __name__ == "__main__":
    print(House().report())
