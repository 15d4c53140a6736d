"""The command line: what it prints where, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tp_transformers import __version__
from tp_transformers.commands import cli
from tp_transformers.commands.serve import command as serve


def command(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    program = [sys.executable, "-m", "tp_transformers", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"example: tp-transformers {name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join
)
def test_help_and_version_import_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from tp_transformers.commands import cli\n"
        "try:\n"
        f"    cli.main({arguments!r})\n"
        "finally:\n"
        "    assert not {'torch', 'transformers', 'yaml'} & sys.modules.keys()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("tp-transformers 0" if arguments == ["--version"] else "usage: tp-transformers")


def test_version_names_the_libraries_too() -> None:
    said = command("--version")
    assert (
        said.stdout
        == f"tp-transformers {__version__} (torch {torch.__version__}, transformers {transformers.__version__})\n"
    )
    assert said.returncode == 0


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_a_server_without_its_packages_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main([name, "model", "-n", "2"]))
    assert ended.value.code
    assert capsys.readouterr().err == (
        f"tp-transformers {name}: packages: got no fastapi, uvicorn, openai, expected them. "
        'pip install "transformers[serving]"\n'
    )


@pytest.mark.slow
def test_run_is_torchrun_with_the_hook_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from transformers import PreTrainedModel\n"
        "hooked = hasattr(PreTrainedModel.from_pretrained, '__wrapped__')\n"
        "text = f\"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]} {hooked}\"\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(text)\n"
        "sys.exit(int(sys.argv[-1]))\n"
    )
    assert command("run", "-n", "2", str(script), "--flag", "0").returncode == 0
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"{rank} of 2 ['--flag', '0'] True"
    assert command("run", "-n", "2", str(script), "3").returncode != 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "-n", "0", __file__], "-n: got 0"),
        (["run", "-n", "2", os.devnull + "/script.py"], "no such file"),
    ],
)
def test_a_wrong_request_is_told_on_stderr(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
