"""The command line: what it prints where, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

from tests.support.needs import needs
from tp_transformers import __version__
from tp_transformers.commands import cli


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    program = [sys.executable, "-m", "tp_transformers", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"example: tp-transformers {name}" in " ".join(capsys.readouterr().out.split())


HELP = """
import contextlib, io, sys
from tp_transformers.commands import cli
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.suppress(SystemExit):
        cli.main(arguments)
    begins = "tp-transformers 0" if arguments == ["--version"] else "usage: tp-transformers"
    assert stdout.getvalue().startswith(begins), (arguments, stdout.getvalue())
    assert not {"torch", "transformers", "yaml"} & sys.modules.keys(), arguments
"""


def test_help_and_version_import_no_torch() -> None:
    subprocess.run([sys.executable, "-c", HELP], timeout=120, check=True)


def test_version_names_the_libraries_too() -> None:
    said = command("--version")
    assert (
        said.stdout
        == f"tp-transformers {__version__} (torch {torch.__version__}, transformers {transformers.__version__})\n"
    )
    assert said.returncode == 0


def test_version_names_the_build_where_the_metadata_does_not(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.2.3")  # as wheels from PyPI leave out "+cu128"
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert f"(torch {torch.__version__}, transformers 1.2.3)" in capsys.readouterr().out


@needs("planner", "verify")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "model", "--timeout", "-1"], "--timeout: got -1, expected seconds above 0"),
        (["suggest", "model", ".", "--force"], ".: got a folder, expected a file"),
        (
            ["suggest", "model", "no/such/plan.yaml"],
            "plan.yaml: got no such file or directory, expected a file",
        ),
        (["suggest", "model", "/proc/plan.yaml"], "/proc/plan.yaml: got no such file or directory, expected a file"),
        (["suggest", "model", "/proc/self/mem/plan.yaml"], "plan.yaml: got not a directory, expected a file that can"),
    ],
)
def test_arguments_that_cannot_be_are_told_before_the_work(arguments, says, capsys) -> None:
    assert cli.main(arguments) == 2
    assert says in capsys.readouterr().err
