"""A feature is a folder that can be taken out.

Without one feature, the commands and a load of the core work, and the other tests can be imported. With a feature of
`ALONE` and the features that it requires, and no other, the tests of the feature pass: so the feature needs no other
one. Without all features, the tests of the core pass, the demo and the first script of the README.

`make without` does so with each feature; SAMPLE=3 with three, others every day, and then without all.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.demo import prepare
from tests.support.needs import required
from tests.support.readme import README, blocks
from tp_transformers.seams import features

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COPIED = ("tp_transformers", "model_plans", "benchmarks", "tests", "docs", "examples")
LLAMA = "tests/distributed/test_llama.py::test_variant_matches_one_process"
MODELS = "tests/distributed/test_architectures.py::test_architecture_matches_one_process"
SHAPES = (
    f"{LLAMA}[9-3-2]",
    f"{LLAMA}[9-3-3]",
    *(f"{MODELS}[{name}-{size}]" for name in ("mixtral-9-3", "phi3-9-3", "gpt2-9-9") for size in (2, 3)),
)
"""Models that load, generate, compute gradients and save as one process."""
CORE = [str(path.parent.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "unit").glob("*/__init__.py"))]
"""Unit tests of the core; files beside these folders are tests of the package as a whole, and of the pages."""
ALONE = {
    *("activations", "batch_sharded", "command_line", "data_parallel", "dcp", "debug", "env", "full_parameters"),
    *("gguf", "infer", "loss_parallel", "machines", "page_cache", "shares"),
}
"""Features whose tests name all that they need."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""(arguments of python -m, variables of the environment) -> the process, which has ended, in a copy of the package."""


def sample() -> list[str]:
    """Features to take out: SAMPLE of them, others every day; all without SAMPLE."""
    names, count = sorted(features()), int(os.environ.get("SAMPLE") or len(features()))
    first = datetime.date.today().toordinal() * count % max(len(names), 1)  # none in a copy without all
    return sorted((names + names)[first : first + count])


def dependants(gone: str) -> set[str]:
    """The feature `gone`, and those that require it, themselves or through others."""
    found = {gone}
    for name, feature in features().items():  # those that a feature requires come before it
        found |= {name} if found & set(feature.requires) else set()
    return found


def copy_without(gone: set[str], target: Path) -> Run:
    """Copy the package, tests and pages, but for the folders of features; returns how to run modules of the copy."""
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"):
        shutil.copy(path, target)
    for name in gone:
        for folder in ("tp_transformers/features", "tests/features"):
            shutil.rmtree(target / folder / name, ignore_errors=True)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(target), **variables}
        program = [sys.executable, "-m", *arguments]
        return subprocess.run(program, cwd=target, env=environment, capture_output=True, text=True, timeout=1200)

    return run


def check_commands(run: Run, gone: set[str], folder: Path) -> None:
    """The commands of the features `gone` are not there; each gives the error of a misspelt one."""
    helped = run("tp_transformers.commands.cli", "--help")
    assert helped.returncode == 0, helped.stderr
    there = {command for name, feature in features().items() if name not in gone for command in feature.commands}
    every = {command for feature in features().values() for command in feature.commands}
    for command in every:
        assert bool(re.search(rf"\n    {command}\s", helped.stdout)) == (command in there), helped.stdout
    lost = sorted(every - there)
    for command in [*lost[:1], "misspelt"]:
        refused = run("tp_transformers.commands.cli", command)
        assert refused.returncode == 2
        assert f"invalid choice: '{command}' (choose from " in refused.stderr
        assert f"; no folder of {folder / 'tp_transformers' / 'features'} adds it\n" in refused.stderr


def check_tests(run: Run, *tests: str, **variables: str) -> None:
    tested = run("pytest", "-q", "-p", "no:cacheprovider", *tests, **variables)
    assert tested.returncode == 0, tested.stdout[-5000:]


def check_collects(run: Run) -> None:
    """All other tests can be imported."""
    collected = run("pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests", MATRIX="1")
    assert collected.returncode == 0, collected.stdout[-5000:]


@pytest.mark.parametrize("gone", sample())
def test_without(gone, tmp_path) -> None:
    absent = dependants(gone)
    run = copy_without({gone}, tmp_path)
    check_commands(run, absent, tmp_path)
    check_collects(run)
    check_tests(run, SHAPES[0], MATRIX="1")


@pytest.mark.parametrize("alone", sorted(ALONE.intersection(sample())))
def test_alone(alone, tmp_path) -> None:
    run = copy_without(set(features()) - required(alone), tmp_path)
    check_tests(run, "-m", "not slow", f"tests/features/{alone}")


def test_without_all(tmp_path) -> None:
    run = copy_without(set(features()), tmp_path)
    check_commands(run, set(features()), tmp_path)
    check_collects(run)
    check_tests(run, *SHAPES, MATRIX="1")
    check_tests(run, "-m", "not slow", *CORE, "tests/distributed")
    demo = run("benchmarks.demo", "--ranks", "3")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    script = next(block.code for block in blocks(README) if block.code.startswith("# generate.py"))
    (tmp_path / "generate.py").write_text(script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(prepare())))
    launched = run("torch.distributed.run", "--nproc-per-node", "3", "-m", "tp_transformers", "generate.py")
    assert launched.returncode == 0, launched.stderr
    assert "The sky is" in launched.stdout
