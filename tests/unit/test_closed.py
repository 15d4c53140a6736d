"""Strategies are closed: other packages ask a strategy's attributes, never for its class."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Shard

import tp_transformers
from tests.support.imports import tree_of
from tp_transformers.strategies import (
    STRATEGIES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)
from tp_transformers.strategies.signature import BATCH, FEATURES, PARTIAL, REPLICATED, SEQUENCE, Signature, state_of

ROOT = Path(tp_transformers.__file__).parent


def classes() -> dict[str, str]:
    """{name: module} of all strategy classes of the package but the contract itself."""
    assert len(STRATEGIES) > 50  # features are imported
    assert STRATEGIES.find("a name of none") is None  # likewise
    found, open_ = dict[str, str](), [TensorParallelLayer]
    while open_:
        children = [each for each in open_.pop().__subclasses__() if each.__module__.startswith("tp_transformers.")]
        found |= {child.__name__: child.__module__ for child in children}
        open_ += children
    return found


def asked(tree: ast.Module) -> set[str]:
    """Names that `isinstance` and `issubclass` calls, comparisons and `match` statements of a module ask for."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            about = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.Compare):
            about = [node.left, *node.comparators]
        else:
            about = [node.cls] if isinstance(node, ast.MatchClass) else []
        for each in about:
            named = ast.walk(each)
            found |= {inner.id for inner in named if isinstance(inner, ast.Name)}
            found |= {inner.attr for inner in ast.walk(each) if isinstance(inner, ast.Attribute)}
            found |= {str(inner.value) for inner in ast.walk(each) if isinstance(inner, ast.Constant)}
    return found


def test_nobody_else_asks_for_the_class_of_a_strategy() -> None:
    known = classes()
    assert {"ColwiseParallel", "SequenceGatherParallel", "TorchStyleParallel", "RegionBlock"} <= known.keys()
    inside = ("strategies", "features/foreign_styles")  # the latter asks for styles of torch, some by the same names
    outside = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).as_posix().startswith(inside)]
    for path in outside:
        folder = ".".join(("tp_transformers", *path.relative_to(ROOT).parts[:-1], ""))  # a feature may ask for its own
        assert not [name for name in asked(tree_of(path)) & known.keys() if not known[name].startswith(folder)], path


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, ColwiseParallel)",
        "isinstance(x, (int, s.ColwiseParallel))",
        "type(x) is ColwiseParallel",
        "type(x).__name__ == 'ColwiseParallel'",
        "match x:\n    case ColwiseParallel():\n        pass",
    ],
)
def test_every_way_to_ask_is_seen(code) -> None:
    assert "ColwiseParallel" in asked(ast.parse(code))


def test_both_forms_of_communication_follow_the_most_derived_class() -> None:
    class Static(ColwiseParallel):
        @staticmethod
        def _prepare_input_fn(first: Any, second: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
            return ("static", first, second, *inputs)

    class Plain(Static):
        def before(self, module: Any, inputs: Any, mesh: Any) -> Any:
            return ("plain", *Static._prepare_input_fn(None, None, module, inputs, mesh))

    class Inherits(Plain): ...

    strategy = Static()
    layouts = (strategy.input_layouts, strategy.desired_input_layouts)
    assert strategy.before(None, (1,), None) == ("static", *layouts, 1)  # type: ignore[arg-type]
    for each in (Plain(), Inherits()):
        module = type("Module", (), {"tp_strategy": each})()
        assert each.before(module, (1,), None) == ("plain", "static", None, None, 1)  # type: ignore[arg-type]
        assert type(each)._prepare_input_fn(None, None, module, (1,), None) == each.before(module, (1,), None)  # type: ignore[arg-type]
    assert not TensorParallelLayer().acts
    assert Static().acts


def test_what_others_ask() -> None:
    assert RowwiseParallel().signature == Signature(FEATURES, REPLICATED, inside=(FEATURES, PARTIAL))
    assert ColwiseParallel().signature.leaves is FEATURES
    assert not ColwiseParallel().signature.sums
    states = [state_of(Shard(dim)) for dim in range(-3, 3)]
    assert states == [BATCH, SEQUENCE, FEATURES] * 2
    with pytest.raises(NotImplementedError):
        TensorParallelLayer().adapter()
