"""The benchmark of computing as a whole: sides that are right are timed in turn, and collectives are counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.forward import WIDTHS
from benchmarks.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize("options", [("--widths", "small"), ("--fake",)], ids=["two ranks", "faked"])
def test_a_run_writes_its_numbers(options, tmp_path) -> None:
    command = [sys.executable, "-m", "benchmarks", "forward", "--rounds", "2", "--ranks", "2", "--timeout", "300"]
    command += ["--scenarios", "prefill,training step", "--results", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["models"]["llama"]["2"]
    assert found["refused"] == {}
    assert found["errors"].keys() == (set() if "--fake" in options else {"ours", "native", "plain"})
    layers = WIDTHS["tiny" if "--fake" in options else "small"]["num_hidden_layers"]
    counted = {name: scenario["collectives"]["ours"]["all_reduce"] for name, scenario in found["scenarios"].items()}
    assert counted["prefill"] == 2 * layers + 1, "attention and MLP of every layer, and the embedding"
    assert counted["training step"] >= 2 * counted["prefill"] - 1, "the backward has as many, but for the embedding"
    for scenario in found["scenarios"].values():
        sides = {"ours", "native", "plain"} | (set() if "--fake" in options else {"alone"})
        assert scenario["seconds"].keys() == sides
        for side, ratio in scenario["ratios"].items():
            others, ours = (scenario["seconds"][each]["values"] for each in (side, "ours"))
            assert ratio["values"] == [other / own for other, own in zip(others, ours, strict=True)]
    table = path.with_suffix(".md").read_text()
    assert "| llama | 2 | prefill |" in table
