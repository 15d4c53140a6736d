"""The command for GPUs, rehearsed on a CPU: every step passes, a cut run leaves tables, a call goes on after it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import IMPORTED, STEPS
from benchmarks.gpu.step import module_of
from benchmarks.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def command(path: Path, *options: str) -> list[str]:
    """The command of a rehearsal."""
    found = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rehearse", "--folder", str(path / "made")]
    return [*found, "--results", str(path / "results"), *options]


def rehearse(path: Path, *options: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """The output of a rehearsal, and its results."""
    done = subprocess.run(command(path, *options), cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((path / "results" / "gpu.json").read_text())["steps"]


def test_every_step_passes_and_leaves_its_tables(tmp_path) -> None:
    output, steps = rehearse(tmp_path, "--minutes", "12")
    assert steps.keys() == STEPS.keys()
    for name, step in steps.items():
        assert step["status"] == "passed", output
        assert step["lines"] or name == "more_tests"
    decoded = [line for line in steps["decode"]["lines"] if "same" in line]
    names = {line["what"] for line in decoded}
    assert names >= {f"ours, rank 0 of 1, batch 1, {mode}" for mode in ("eager", "graph", "compiled")}
    for line in decoded:
        assert line["same"] == line["steps"] > 0, "a graph writes the tokens of eager steps"
        assert not line["waits"]
        assert line["breaks"] == 0
        assert line["graphs"] == line["what"].endswith("compiled")
    page = (tmp_path / "results" / "gpu.md").read_text()
    assert page.count("\n## ") == len(STEPS)
    assert page.partition("\n\n")[0].count("| passed |") == len(STEPS)
    for name in ("gpu.log", "train-trace.json.gz"):
        assert (tmp_path / "results" / name).stat().st_size > 0


def test_a_call_goes_on_where_one_ended_and_names_what_has_not_run(tmp_path) -> None:
    output, steps = rehearse(tmp_path, "--only", "machine", "--minutes", "0.001", code=1)
    assert steps["machine"]["status"] == "out of time"
    assert "machine: out of time" in output
    output, steps = rehearse(tmp_path, "--only", "machine")
    assert steps["machine"]["status"] == "passed"
    began = steps["machine"]["seconds"]
    output, steps = rehearse(tmp_path, "--only", "machine")
    assert steps["machine"]["seconds"] == began, "a step that has passed is kept"


def left(path: Path) -> list[str]:
    """Commands of the processes that name the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        found += [text] if str(path) in text else []
    return found


def test_a_run_that_is_killed_leaves_its_tables_and_no_process(tmp_path) -> None:
    page = tmp_path / "results" / "gpu.md"
    process = subprocess.Popen(command(tmp_path, "--only", "machine,decode"), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not (page.exists() and "rank 0 of 1, batch 1, eager" in page.with_name("gpu.json").read_text()):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    table = page.read_text().partition("\n\n")[0]
    assert "| machine | passed |" in table
    assert "| decode | begun |" in table
    assert "ours, rank 0 of 1, batch 1, eager: " in table
    assert "| train | not begun |" in table
    end = time.monotonic() + 30
    while left(tmp_path):
        assert time.monotonic() < end, left(tmp_path)
        time.sleep(0.1)


def test_imports_use_no_gpu() -> None:
    """Else the copies of the process with these imports could not use one."""
    names = [*IMPORTED, *(module_of(name).__name__ for name in STEPS)]
    code = f"""
import sys, importlib, torch
def used(*_): sys.exit("the GPU is used")
torch.cuda._lazy_init = used
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
