"""Commands on a model with code of its own: the code runs where `--trust-remote-code` says so, and nowhere else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.support.commands import main
from tests.support.needs import needs
from tests.support.remote_code import with_code

COMMANDS = {
    "plan": ["--tp-size", "2", "--plan", "infer"],
    "verify": ["--plan", "infer", "--tp-size", "1"],
    "suggest": ["{out}.yaml", "--no-verify"],
    "shard": ["{out}", "--tp-size", "2", "--plan", "infer"],
}


@needs("infer", "planner", "presharded", "verify")
@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_a_repository_runs_only_if_it_is_asked_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = with_code(tmp_path / "model", "fused"), tmp_path / "ran"
    code = Path(folder, "modeling_fused.py")
    code.write_text(f"open({str(ran)!r}, 'w').close()\n{code.read_text()}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))  # nobody is asked
    monkeypatch.chdir(tmp_path)
    arguments = [name, folder, *(each.format(out=tmp_path / "out") for each in COMMANDS[name])]
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not ran.exists()
    assert said.out == ""
    assert said.err.startswith(f"tp-transformers {name}: {folder}: got a model of its repository's own code")
    assert "--trust-remote-code" in said.err
    assert len(said.err.splitlines()) == 1
    if name == "verify":  # starts ranks; `suggest` has proven it the same way
        return
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert ran.exists()
    assert "not run" not in capsys.readouterr().err
