"""Imports of the package, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "tp_transformers"
ROOT = Path(__file__).parents[2] / PACKAGE

ORDER = (
    "errors",
    "seams",
    "logs",
    "namespaces",
    "marks",
    "copies",
    "torch_api",
    "patches",
    "transformers_api",
    "slices",
    "ranks",
    "anatomy",
    "strategies",
    "plans",
    "checkpoint",
    "model",
    "training",
    "loading",
    "debug",
    "",
    "commands",
    "__main__",
    "features",
    "trainer",
    "verify",
)
"""Packages and modules at the top level; each imports those before it. "" is `tp_transformers/__init__.py`."""
NAMING = ("", "checkpoint", "debug", "seams", "strategies", "training")
"""Modules whose imports for typing do not count: they name the types and the public names of what features add."""


class Imports:
    """Modules of a package and the modules that each imports, imports for typing included."""

    def __init__(self, root: Path = ROOT) -> None:
        """Read every module below `root`."""
        self.files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
        self.lines = {name: len(path.read_text().splitlines()) for name, path in self.files.items()}

    @cached_property
    def of_module(self) -> Mapping[str, set[str]]:
        """{module: modules that it imports}; names are dotted and relative to the package."""
        return {name: set(self._imported(name)) - {name} for name in self.files}

    @cached_property
    def of_package(self) -> Mapping[str, set[str]]:
        """{top-level package or module: those that it imports}."""
        found: dict[str, set[str]] = {top(name): set() for name in self.files}
        for name, targets in self.of_module.items():
            found[top(name)] |= {top(target) for target in targets} - {top(name)}
        return found

    @property
    def upward(self) -> list[tuple[str, str]]:
        """(module, imported module) pairs in which the imported package comes later in ORDER."""
        place = ORDER.index
        return [
            (name, target)
            for name, targets in self.of_module.items()
            for target in sorted(targets)
            if place(top(target)) > place(top(name))
        ]

    @property
    def circles(self) -> list[list[str]]:
        """Chains of modules in which the last imports the first."""
        found: list[list[str]] = []
        done: set[str] = set()

        def visit(name: str, chain: list[str]) -> None:
            if name in chain:
                found.append([*chain[chain.index(name) :], name])
            elif name not in done:
                for target in sorted(self.of_module[name]):
                    visit(target, [*chain, name])
                done.add(name)

        for name in self.files:
            visit(name, [])
        return found

    def _imported(self, name: str) -> Iterator[str]:
        path = self.files[name]
        package = name.split(".") if name else []
        if path.name != "__init__.py":
            package = package[:-1]
        tree = tree_of(path)
        typing = {id(node) for part in ast.walk(tree) if _is_for_typing(part) for node in ast.walk(part)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or (name in NAMING and id(node) in typing):
                continue
            parts = (node.module or "").split(".")
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *parts]).strip(".")
            elif parts[0] == PACKAGE:
                base = ".".join(parts[1:])
            else:
                continue
            for alias in node.names:
                module = f"{base}.{alias.name}".strip(".")
                yield module if module in self.files else base


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module; not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_for_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def top(name: str) -> str:
    """Top-level package or module of the dotted `name`."""
    return name.partition(".")[0]


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")
