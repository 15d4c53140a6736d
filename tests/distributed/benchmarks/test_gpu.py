"""The command for GPUs, rehearsed on a CPU: every step passes, a call goes on where one ended, failures are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import STEPS
from benchmarks.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def rehearse(path: Path, *options: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """The output of a rehearsal, and its results."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rehearse", "--folder", str(path / "made")]
    command += ["--results", str(path / "results"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((path / "results" / "gpu.json").read_text())["steps"]


def test_every_step_passes_and_leaves_its_tables(tmp_path: Path) -> None:
    output, steps = rehearse(tmp_path, "--minutes", "12")
    assert steps.keys() == STEPS.keys()
    for name, step in steps.items():
        assert step["status"] == "passed", output
        assert step["lines"] or name == "more_tests"
    decoded = [line for line in steps["decode"]["lines"] if "same" in line]
    assert {(line["mode"], line["side"]) for line in decoded} >= {("graph", "ours"), ("compiled", "ours")}
    for line in decoded:
        assert line["same"] == line["steps"] > 0, "a graph writes the tokens of eager steps"
        assert not line["waits"]
        assert line["breaks"] == 0
        assert line["graphs"] == (line["mode"] == "compiled")
    page = (tmp_path / "results" / "gpu.md").read_text()
    assert page.count("\n## ") == len(STEPS)
    for name in ("gpu.log", "decode.png", "load.png", "train-trace.json.gz"):
        assert (tmp_path / "results" / name).stat().st_size > 0


def test_a_call_goes_on_where_one_ended_and_names_what_has_not_run(tmp_path: Path) -> None:
    output, steps = rehearse(tmp_path, "--only", "collectives", "--minutes", "0.001", code=1)
    assert steps["collectives"]["status"] == "out of time"
    assert "collectives: out of time" in output
    output, steps = rehearse(tmp_path, "--only", "collectives")
    assert steps["collectives"]["status"] == "passed"
    began = steps["collectives"]["seconds"]
    output, steps = rehearse(tmp_path, "--only", "collectives")
    assert steps["collectives"]["seconds"] == began, "a step that has passed is kept"
