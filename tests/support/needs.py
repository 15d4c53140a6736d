"""Features that tests need: `python -m tests.support.needs` prints files that need features of others.

The imports at the top of a file, and of the files of the tests that it imports, name the features that the file needs:
without the folder of such a feature the file is not collected. A test that needs a feature without an import, for
instance by an argument of the load, has the mark `needs`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tp_transformers.seams import features, public_names

ROOT = Path(__file__).parents[2]
SHORT = {"tp_transformers.trainer": "trainer", "tp_transformers.verify": "verify"}
"""Modules at the top level that are of features."""

needs = pytest.mark.needs
"""`@needs("sequence", "shares")`: where one of these features is not there, the test is left out."""
STRATEGIES_OF: Mapping[str, tuple[str, ...]] = {
    "architectures": (
        *("alibi", "mla_kv_a_proj", "moe_identity_expert", "replicate_inner", "replicate_once"),
        *("sharded_moments", "sharded_norm", "sharded_products"),
    ),
    "expert_parallel": ("ep_dispatch_experts", "grouped_gemm", "local", "moe_all_to_all"),
    "loss_parallel": ("colwise_loss", "loss_parallel"),
    "mixers": ("channelwise", "gated_norm", "rowwise_inner"),
    "sequence": (
        *("sequence_gather", "sequence_parallel", "sequence_parallel_rep", "sequence_scatter"),
        *("sequence_states", "sequence_whole"),
    ),
}
"""Feature -> strategies that the feature adds; without those of invariant plans, which have tests apart."""


def uneven(shares: Iterable[float]) -> list[Any]:
    """Marks of a case by `shares`, which need the feature unless they are even."""
    return [needs("shares")] if len(set(shares)) > 1 else []


def strategy_case(name: str, *values: object) -> Any:
    """A case of a parametrization that needs the feature of the strategy `name`."""
    return pytest.param(name, *values, marks=[needs(of) for of, names in STRATEGIES_OF.items() if name in names])


def known_strategies(names: Iterable[str]) -> list[str]:
    """Names of strategies, sorted, without names of features that are not there."""
    lacking = {name for of in STRATEGIES_OF.keys() - features().keys() for name in STRATEGIES_OF[of]}
    return sorted(set(names) - lacking)


@cache
def needed(file: Path) -> Mapping[str, Path]:
    """{feature: the file that imports it} of a file and of those of the tests and benchmarks that it imports.

    A public name that is not there is a feature of that name.
    """
    found: dict[str, Path] = {}
    for module, name in _imports(file):
        top, _, rest = module.partition(".")
        path = [*module.split("."), name]
        if path[:2] == ["tests", "features"]:
            found[path[2]] = file
        if top in ("tests", "benchmarks"):
            files = (ROOT.joinpath(*path[:length]).with_suffix(".py") for length in (len(path), len(path) - 1))
            found |= next((needed(inner) for inner in files if inner.is_file()), {})
        elif path[:2] == ["tp_transformers", "features"] and len(path) > 3:
            found[path[2]] = file
        elif module in SHORT:
            found[SHORT[module]] = file
        elif top == "tp_transformers" and name in public_names(rest):
            found[public_names(rest)[name].split(".")[1]] = file
        elif top == "tp_transformers" and name in (public := import_module(module)).__dict__.get("__all__", ()):
            found |= {} if hasattr(public, name) else {name: file}
    return found


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name in it) of the imports at the top of a file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}", alias.name) for alias in node.names)


def lacking(file: Path) -> set[str]:
    """Features that a file needs and that are not there, or lack one that they require."""
    return needed(file).keys() - features().keys()


def required(name: str) -> set[str]:
    """The feature, and the features that it requires, themselves or through others."""
    return {name}.union(*map(required, features()[name].requires))


def of_others() -> list[str]:
    """ "file: feature" of those that need a feature which neither is theirs nor is required by theirs."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        own = required(parts[2]) if parts[1] == "features" and len(parts) > 3 else set()
        found += [f"{'/'.join(parts)}: {name}, by {by.name}" for name, by in needed(path).items() if name not in own]
    return found


if __name__ == "__main__":
    print(*of_others(), sep="\n")
