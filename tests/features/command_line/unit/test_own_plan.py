"""`--import` and `--plan`: strategies and a plan of one's own in the commands."""

import argparse
from pathlib import Path

import pytest

from tests.support.models import llama_config
from tests.support.needs import needs
from tp_transformers.features.command_line.arguments import add_plan, passed_on
from tp_transformers.strategies import STRATEGIES

STRATEGY = """
from tp_transformers.strategies import STRATEGIES


class Own(type(STRATEGIES["colwise"])):
    pass


STRATEGIES.register_strategy("own_colwise", Own)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config, a plan, and the file of the strategy that it names."""
    llama_config(4, 2).save_pretrained(tmp_path)
    (tmp_path / "own_strategies_of_a_test.py").write_text(STRATEGY)
    (tmp_path / "plan.yaml").write_text("extends: llama\nbase_model: {layers.*.mlp.gate_proj: own_colwise}\n")
    return tmp_path


@needs("planner")
def test_a_file_registers_what_a_plan_names(folder, printed) -> None:
    command = ["plan", str(folder), "--tp-size", "2", "--plan", str(folder / "plan.yaml")]
    assert "(--import in commands)" in printed(*command, code=2)
    try:
        assert "own_colwise" in printed(*command, "--import", str(folder / "own_strategies_of_a_test.py"))
    finally:
        STRATEGIES.pop("own_colwise", None)


@needs("planner")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing.py", "--import: got nothing.py, expected a Python file"),
        ("plan.yaml", "--import: got plan.yaml, expected a Python file"),
        ("argparse.py", "expected one. Give your file a name of its own"),
    ],
)
def test_what_cannot_be_imported_is_named(folder, printed, monkeypatch, name, says) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # undone with what the command adds
    (folder / "argparse.py").write_text("")
    assert says in printed("plan", str(folder), "--tp-size", "2", "--import", name, code=2)


def test_other_processes_get_full_paths(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    parser = argparse.ArgumentParser()
    add_plan(parser)
    assert passed_on(parser.parse_args([])) == ["--plan", "auto"]
    given = parser.parse_args(["--plan", "plan.yaml", "--import", "a.py", "--import", "b.py"])
    files = [part for name in ("a.py", "b.py") for part in ("--import", str(folder / name))]
    assert passed_on(given) == ["--plan", str(folder / "plan.yaml"), *files]
