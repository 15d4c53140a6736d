"""A feature is a folder that can be taken out: the command line and the loads of the core are there without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import wide
from tp_transformers.seams import features

ROOT = Path(__file__).parents[2]
COPIED = ("tp_transformers", "model_plans", "benchmarks", "tests")
CORE = "tests/distributed/test_llama.py::test_variant_matches_one_process[9-3-2]"
"""A Llama on 2 ranks loads, generates, trains and saves as one process."""
ALL = "all of them"


def dependants(gone: str) -> set[str]:
    """The feature `gone`, and those that require it, themselves or through others."""
    found = {gone}
    for name, feature in features().items():  # those that a feature requires come before it
        found |= {name} if found & set(feature.requires) else set()
    return found


def copy_without(gone: str, target: Path) -> None:
    """Copy the package and the tests, but for the folders of one feature, or of all."""
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "results", "*.md"))
    for folder in ("tp_transformers/features", "tests/features"):
        shutil.rmtree(target / folder / ("" if gone == ALL else gone), ignore_errors=True)


@pytest.mark.distributed
@pytest.mark.parametrize("gone", wide(sorted([*features(), ALL], key=lambda name: name != "serve"), 1))
def test_without(gone: str, tmp_path: Path) -> None:
    copy_without(gone, tmp_path)
    absent = set(features()) if gone == ALL else dependants(gone)
    lost = [command for name in absent for command in features()[name].commands()]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        program = [sys.executable, "-m", *arguments]
        return subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    helped = run("tp_transformers.commands.cli", "--help")
    assert helped.returncode == 0, helped.stderr
    for name, feature in features().items():
        for command in feature.commands():
            assert (f"\n    {command} " in helped.stdout) == (name not in absent), helped.stdout
    for command in [*lost[:1], "misspelt"]:
        refused = run("tp_transformers.commands.cli", command)
        assert refused.returncode == 2
        assert f"invalid choice: '{command}' (choose from " in refused.stderr
        assert f"; no folder of {tmp_path / 'tp_transformers' / 'features'} adds it\n" in refused.stderr
    tested = run("pytest", "-q", "-p", "no:cacheprovider", CORE)
    assert tested.returncode == 0, tested.stdout[-5000:]
