"""Public names: few at the top, the others in namespaces; those that have moved still work, and say where to."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import tp_transformers

NAMESPACES = ("checkpoint", "debug", "plans", "strategies", "training")
FORMER = {
    "checkpoint": ["load_distributed_checkpoint", "verify_sharded"],
    "debug": ["Partition", "check_inputs", "check_replicas", "partition"],
    "plans": ["Attention", "Plan", "Rule"],
    "strategies": [
        "ColwiseParallel",
        "GatherParallel",
        "IsolatedParallel",
        "PackedColwiseParallel",
        "PackedRowwiseParallel",
        "ParallelInterface",
        "ReplicateParallel",
        "ReplicateSumGradParallel",
        "RowwiseParallel",
        "STRATEGIES",
        "SequenceParallel",
        "TensorParallelLayer",
        "get_packed_weights",
        "get_tensor_shard",
        "vocab_parallel_cross_entropy",
    ],
    "training": ["load_optimizer_state_dict", "optimizer_state_dict", "parameter_groups"],
}
"""Namespace -> its names that were at the top."""
MOVED = [(namespace, name) for namespace, names in FORMER.items() for name in names]


def modules() -> list[ModuleType]:
    return [tp_transformers, *(import_module(f"tp_transformers.{name}") for name in NAMESPACES)]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_public_names_are_sorted_and_there(module) -> None:
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'colwise'"):
        _ = module.colwise


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_type_checkers_know_the_public_names(module) -> None:
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    known = {alias.asname or alias.name for node in imports for alias in node.names}
    assert set(module.__all__) <= known
    if module is tp_transformers:
        whole = {node.module for node in imports if node.names[0].name == "*"}
        kept = {alias.asname for node in imports for alias in node.names}  # `as` exports a name that `__all__` lacks
        assert {name for namespace, name in MOVED if namespace not in whole} <= kept


def test_few_names_are_at_the_top() -> None:
    assert len(set(tp_transformers.__all__) - set(NAMESPACES)) <= 16
    assert set(NAMESPACES) <= set(tp_transformers.__all__)


@pytest.mark.parametrize(("namespace", "name"), MOVED)
def test_a_name_that_has_moved_works_and_says_where_to(namespace, name) -> None:
    value = getattr(import_module(f"tp_transformers.{namespace}"), name)
    place = rf"^tp_transformers\.{name} has moved to tp_transformers\.{namespace}\.{name}$"
    with pytest.warns(DeprecationWarning, match=place) as caught:
        assert getattr(tp_transformers, name) is value
    assert {Path(each.filename).name for each in caught} == {Path(__file__).name}
    assert name not in dir(tp_transformers)


def test_an_import_of_a_name_that_has_moved_is_told_at_its_line() -> None:
    program = "from tp_transformers import Plan\nfrom tp_transformers.plans import Plan as new\nassert Plan is new"
    place = r"^tp_transformers\.Plan has moved to tp_transformers\.plans\.Plan$"
    with pytest.warns(DeprecationWarning, match=place) as told:
        exec(program, {"__name__": "program"})
    assert {(each.filename, each.lineno) for each in told} == {("<string>", 1)}


def test_a_star_import_gives_the_names_at_the_top_and_the_namespaces() -> None:
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from tp_transformers import *", names)
    assert names.keys() - {"__builtins__"} == set(tp_transformers.__all__)


def test_namespaces_import_torch_when_a_name_is_used() -> None:
    program = (
        "import sys\n"
        "import tp_transformers, tp_transformers.checkpoint, tp_transformers.plans, tp_transformers.training\n"
        "assert not sys.modules.keys() & {'torch', 'transformers'}\n"
        "sys.modules['torch'] = None  # an import of it is an error\n"
        "try:\n"
        "    tp_transformers.plans.Plan\n"
        "except ImportError as error:\n"
        "    assert error.name == 'torch'\n"
        "else:\n"
        "    raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
