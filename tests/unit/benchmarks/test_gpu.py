"""The command for GPUs: its summary names failures, its times are reckoned, and a decode step is counted correctly."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processes
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import STEPS, Record
from benchmarks.gpu.device import Device
from benchmarks.gpu.step import Job, Lines, table_of
from benchmarks.gpu.tests import FILES, OUTCOME


def record(path: Path) -> Record:
    arguments = argparse.Namespace(results=path, device="cpu", rehearse=True)
    return Record(arguments, {"name": "one", "count": 1})


def row_of(page: str, step: str) -> list[str]:
    """The cells of a step in the first table of a page."""
    (row,) = re.findall(rf"^\| {step} \|.*", page.partition("\n\n")[0], re.MULTILINE)
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_eight_minutes_are_enough(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--reckon"])
    assert command.main() == 0
    (seconds,) = re.findall(r"^\| all[^|]*\| (\d+)", capsys.readouterr().out, re.MULTILINE)
    assert int(seconds) <= 8 * 60


def test_a_measurement_is_in_the_first_table_before_the_next_one(tmp_path, monkeypatch) -> None:
    """All that a killed run leaves is what is on the disk by then."""
    seen = []

    def run(module: str, jobs: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        if "device" in module:
            return [{"name": "one", "count": 1}]
        with open(jobs[0]["lines"], "a") as file:
            file.write(json.dumps({"what": "rank 0 of 8", "s": 2.5, "took": 3.0}))
            file.write("\n{")  # a line that is not complete yet
            file.flush()
            options.get("watch", lambda: None)()
            seen.append((tmp_path / "gpu.md").read_text())
            file.write("}\n")
        return [{}]

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(command, "_prepared", lambda *_: command.nullcontext())
    monkeypatch.setattr(sys, "argv", ["gpu", "--device=cpu", "--rehearse", "--only=load", f"--results={tmp_path}"])
    command.main()
    (page,) = seen
    status, seconds, reckoned, measured, result = row_of(page, "load")
    assert (status, measured) == ("begun", "1 of 1")
    assert result == "rank 0 of 8: 2.5 s"
    assert float(seconds) <= float(reckoned)
    assert row_of(page, "train")[0] == "not begun"
    assert set(re.findall(r"^\| (\w+) \|", page.partition("\n\n")[0], re.MULTILINE)) >= set(STEPS)
    assert row_of((tmp_path / "gpu.md").read_text(), "load")[0] == "passed"


def test_the_summary_names_what_failed_and_what_had_no_time(tmp_path) -> None:
    found = record(tmp_path)
    lines = [{"what": "a", "side": "ours"}, {"what": "b", "error": "ValueError: wrong"}, {"what": "c", "late": "2 s"}]
    found.add("load", {"status": "FAILED", "seconds": 3.0, "lines": lines, "error": "--- process 0: exit code 1\nmore"})
    summary = found.summary()
    assert "load: FAILED, 3 s, 3 measurements" in summary
    assert "FAILED  b: ValueError: wrong" in summary
    assert "NOT RUN c: 2 s" in summary
    assert "process 0: exit code 1" in summary
    assert summary in (tmp_path / "gpu.md").read_text()
    assert record(tmp_path).steps == found.steps


def test_results_of_other_code_are_not_kept(tmp_path) -> None:
    found = record(tmp_path)
    found.add("load", {"status": "passed", "seconds": 3.0, "lines": [], "error": ""})
    text = json.loads((tmp_path / "gpu.json").read_text())
    text["about"]["code"] = "other"
    (tmp_path / "gpu.json").write_text(json.dumps(text))
    assert not record(tmp_path).has_passed("load")


def test_a_measurement_that_fails_leaves_the_others(tmp_path) -> None:
    job = Job("load", "cpu", True, "", "", str(tmp_path / "lines"), until=float("inf"))
    lines = Lines(job)
    lines.measure("wrong", lambda: {"x": 1 / 0})
    lines.measure("right", lambda: {"x": 1})
    wrong, right = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert wrong["error"] == "ZeroDivisionError: division by zero"
    assert right["x"] == 1
    late = Lines(Job("load", "cpu", True, "", "", str(tmp_path / "lines"), until=0.0))
    assert "late" in late.measure("late", lambda: {"x": 1}, needs=1.0)


@pytest.mark.parametrize("name", STEPS)
def test_every_step_has_a_table(name) -> None:
    lines = [{"what": "a", "x": 1.23456, "took": 1.0}, {"what": "b", "text": "1\n2", "took": 1.0}]
    page = "\n".join(table_of(name, lines))
    assert name.endswith("tests") or "| measured | x |\n| --- | --- |\n| a | 1.235 |" in page
    assert name.endswith("tests") or "b, text:\n\n```text\n1\n2\n```" in page


def test_waits_of_the_host_are_counted() -> None:
    x, device = torch.arange(3.0), Device()
    assert device.host_waits(lambda: x.sum().item()) == 1
    assert device.host_waits(lambda: x[x > 1]) == 1
    assert device.host_waits(lambda: x + x) == 0


def test_every_file_of_tests_is_run() -> None:
    files = (processes.ROOT / "tests" / "gpu").glob("test_*.py")
    assert sorted(FILES) == sorted(path.stem.removeprefix("test_") for path in files)


def test_outcomes_of_pytest_are_read() -> None:
    line = "tests/gpu/test_packed.py::test_products[2-int4 with zeros] FAILED                 [ 10%]"
    found = OUTCOME.match(line)
    assert found.groups() == ("tests/gpu/test_packed.py::test_products[2-int4 with zeros]", "FAILED")
