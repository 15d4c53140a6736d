"""Figures of the engine: `python -m tests.support.figures [ROOT ...]` prints a column for each checkout."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]
PACKAGE = "tp_transformers"
LONG_FUNCTION = 70
LONG_FILE = 300
Figures = dict[str, object]
"""Name of a figure -> the figure, in the order of the table."""


class Checkout:
    """The sources of the package and of the tests in one folder."""

    def __init__(self, root: Path) -> None:
        """Parse the sources below `root`."""
        self.root = root
        self.package, self.tests = (self._parsed(root / name) for name in (PACKAGE, "tests"))

    @staticmethod
    def _parsed(folder: Path) -> dict[Path, ast.Module]:
        return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}

    def figures(self) -> Figures:
        """All figures; those of a forward and of a load need a run."""
        return {**self.sizes(), **self.flags(), **self.forwards(), **self.uses(), **self.journeys()}

    def sizes(self) -> Figures:
        """Lines of functions, of files, of the package and of the tests."""
        functions = {
            f"{path.stem}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
            for path, tree in self.package.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
        }
        longest = max(functions, key=lambda name: functions[name])
        lines, of_tests = ([_lines(path) for path in trees] for trees in (self.package, self.tests))
        return {
            "longest function": f"{longest}, {functions[longest]} lines",
            f"functions over {LONG_FUNCTION} lines": sum(count > LONG_FUNCTION for count in functions.values()),
            "lines of the package": sum(lines),
            "modules of the package": len(lines),
            f"files over {LONG_FILE} lines": sum(count > LONG_FILE for count in lines),
            "lines of the tests": sum(of_tests),
        }

    def flags(self) -> Figures:
        """Class attributes that are booleans, and properties that return one, of a strategy and of its subclasses."""
        classes = {
            node.name: node
            for tree in self.package.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        base, strategies = {"TensorParallelLayer", "Communication"}, {"TensorParallelLayer", "Communication"}
        while grown := {
            name
            for name, node in classes.items()
            if name not in strategies and strategies & {ast.unparse(each) for each in node.bases}
        }:
            strategies |= grown
        found: Figures = {}
        for title, kind in (("boolean attributes", _attributes), ("boolean properties", _properties)):
            of_base = {name for each in base for name in kind(classes[each])}
            own = {name for each in strategies - base for name in kind(classes[each])} - of_base
            found[f"{title} of a strategy"] = f"{len(of_base)}: {', '.join(sorted(of_base))}"
            found[f"{title} that subclasses add"] = f"{len(own)}: {', '.join(sorted(own))}"
        return found

    def uses(self) -> Figures:
        """Names of inner modules in the tests, errors that mypy is told to ignore, private names of torch."""
        names = Counter(self._inner())
        modules = {module for module, _ in names}
        ignored = sum(path.read_text().count("# type: ignore") for path in self.package)
        private = {path: sorted(set(_private_names(tree))) for path, tree in self.package.items()}
        by_file = {str(path.relative_to(self.root / PACKAGE)): found for path, found in private.items() if found}
        count = len({name for found in by_file.values() for name in found})
        return {
            "inner names in the tests": f"{len(names)} from {len(modules)} modules, {sum(names.values())} imports",
            "type: ignore comments": ignored,
            "private names of torch": f"{count} in {len(by_file)} files",
            **{f"  {path}": ", ".join(found) for path, found in by_file.items()},
        }

    def forwards(self) -> Figures:
        """Files and lines of a forward of `q_proj` on one of two ranks."""
        return {
            f"forward of q_proj, {way}": f"{len(lines)} files of {sum(map(self._lines_of, lines))} lines, "
            f"{sum(map(len, lines.values()))} of them run: {', '.join(lines)}"
            for way, lines in self._traces()["forwards"].items()
        }

    def journeys(self) -> Figures:
        """Files and folders of a load in one process, as it runs and as a reader follows it: each function once."""
        found: Figures = {}
        for name, calls in self._traces()["journeys"].items():
            runs = [file for file, _ in calls]
            reads = [file for file, _ in dict.fromkeys(map(tuple, calls))]
            for way, files in (("as it runs", runs), ("as it is read", reads)):
                folders = [str(Path(file).parent) for file in files]
                found[f"{name}, {way}"] = f"{_returns(files)} files, {_returns(folders)} folders"
            visits = Counter(file for file, _ in groupby(reads))
            found[f"  files of {name}"] = " ".join(
                file if count == 1 else f"{file}*{count}" for file, count in visits.items()
            )
        return found

    def _traces(self) -> dict[str, Any]:
        """Output of `tests.support.traces`, run with the package and the tests of this checkout."""
        if not hasattr(self, "_traced"):
            environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
            program = [sys.executable, str(Path(__file__).with_name("traces.py"))]
            done = subprocess.run(
                program, cwd=self.root, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            self._traced: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return self._traced

    def _lines_of(self, file: str) -> int:
        return _lines(self.root / PACKAGE / file)

    def _inner(self) -> Iterator[tuple[str, str]]:
        """(module, name) of every import in the tests of a name that the module's `__all__` lacks."""
        public = {}
        for path, tree in self.package.items():
            parts = path.relative_to(self.root).with_suffix("").parts
            public[".".join(part for part in parts if part != "__init__")] = set(_all(tree))
        for tree in self.tests.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and f"{node.module}".split(".")[0] == PACKAGE:
                    module = f"{node.module}"
                    for alias in node.names:
                        if f"{module}.{alias.name}" not in public and alias.name not in public.get(module, ()):
                            yield module, alias.name


def _returns(places: Iterable[str]) -> str:
    """How often a journey through `places` comes back to one that it had left, and how many places it has."""
    stays = [place for place, _ in groupby(places)]
    return f"{len(stays) - len(set(stays))} times back in {len(set(stays))}"


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _all(tree: ast.Module) -> list[str]:
    """The value of a module's `__all__`; empty without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Class attributes that are annotated as bool, or have a bool as their value."""
    for each in node.body:
        value = each.value if isinstance(each, ast.Assign | ast.AnnAssign) else None
        is_bool = isinstance(value, ast.Constant) and isinstance(value.value, bool)
        if isinstance(each, ast.AnnAssign) and (is_bool or ast.unparse(each.annotation) == "bool"):
            yield ast.unparse(each.target)
        elif isinstance(each, ast.Assign) and is_bool:
            yield from map(ast.unparse, each.targets)


def _properties(node: ast.ClassDef) -> Iterator[str]:
    """Properties that are annotated to return a bool."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.returns is not None and ast.unparse(each.returns) == "bool":
            decorators = map(ast.unparse, each.decorator_list)
            yield from [each.name] if any("property" in decorator for decorator in decorators) else []


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Names of torch that begin with an underscore: imported, reached from `torch`, or attributes of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}".split(".")[0] == "torch":
            for alias in node.names:
                if re.search(r"(^|\.)_", path := f"{node.module}.{alias.name}"):
                    yield path
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            path = ast.unparse(node)
            if path.startswith("torch."):
                yield path
            elif node.attr in _attributes_of_torch() and ast.unparse(node.value) != "self":
                yield node.attr


@cache
def _attributes_of_torch() -> frozenset[str]:
    """Private attributes of the classes of torch that the package meets."""
    from torch import Tensor, distributed, nn, optim
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    kinds = (nn.Module(), Tensor, DTensor, DeviceMesh, optim.Optimizer, distributed.ProcessGroup)
    return frozenset(name for kind in kinds for name in dir(kind) if re.match("_[^_]", name))


def main() -> None:
    """Print a row for each figure and a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="*", type=Path, default=[HERE], metavar="ROOT", help="folder of a checkout")
    roots = [root.resolve() for root in parser.parse_args().roots]
    columns = [Checkout(root).figures() for root in roots]
    names = dict.fromkeys(name for column in columns for name in column)
    print("| figure |", *(f" {root.name} |" for root in roots), sep="")
    print("| --- |", *(" --- |" for _ in roots), sep="")
    for name in names:
        print(f"| {name} |", *(f" {column.get(name, '-')} |" for column in columns), sep="")


if __name__ == "__main__":
    main()
