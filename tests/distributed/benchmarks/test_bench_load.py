"""The loading benchmark as a whole: what it writes, and that it refuses to time a wrong load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoints import ensure, files
from benchmarks.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark on the smallest checkpoints, one pair, with its results beside them."""
    command = [sys.executable, "-m", "benchmarks", "load", "--gigabytes", "0.01", "--pairs", "1", "--timeout", "120"]
    command += ["--folder", str(folder / "checkpoints"), "--results", str(folder / "results"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize(
    ("model", "options", "ranks"),
    [("llama", (), 2), ("mixtral", ("--rank", "1", "--ranks", "4"), 1)],
    ids=["two ranks", "one of four"],
)
def test_a_run_writes_its_numbers_and_leaves_nothing_else(model, options, ranks, tmp_path) -> None:
    done = bench(tmp_path, "--models", model, *options)
    assert done.returncode == 0, done.stderr
    folder = ensure(model, 0.01, tmp_path / "checkpoints")
    assert list(folder.parent.iterdir()) == [folder]
    (path,) = (tmp_path / "results").glob("*.json")
    result = json.loads(path.read_text())
    assert result["command"].startswith("python -m benchmarks load --gigabytes 0.01")
    assert result["machine"].keys() >= {"cpu", "cores", "memory", "gpu", "versions", "date"}
    assert result["sides"] == {"native": "transformers", "ours": "tp_transformers"}
    found = result["models"][model]
    size = sum(file.stat().st_size for file in files(folder))
    assert found["checkpoint"]["bytes"] == size
    assert found["measures"].keys() == {"load", "first_forward", "process", "anonymous", "bytes"}
    for side, runs in found["runs"].items():
        assert [len(run) for run in runs] == [ranks]
        for rank in runs[0]:
            assert 0 < rank["anonymous_shard"] <= rank["shard"] < size
            assert rank["load"] > 0
            assert rank["forward"] > 0
        load = found["measures"]["load"][side]
        assert load["values"] == [load["median"]] == [max(rank["load"] for rank in runs[0])]
    native, ours = (found["measures"]["load"][side]["median"] for side in ("native", "ours"))
    assert found["measures"]["load"]["ratio"]["median"] == native / ours
    held = sum(rank["shard"] for rank in found["runs"]["ours"][0])
    reports = [rank["report"] for rank in found["runs"]["ours"][0]]
    read = sum(report["bytes_read"] + report["mapped"] for report in reports)
    assert held <= found["measures"]["bytes"]["ours"]["median"]
    assert held * 0.95 < read < held * 1.3  # rotary frequencies are held and not read; headers the other way round
    if ranks == 2:
        assert held == pytest.approx(size, rel=0.02)  # norms are on both ranks; headers on none
    text = path.with_suffix(".md").read_text()
    assert text in done.stdout
    assert f"| {model}, 0.01 GB | load | {native:.3g} s | {ours:.3g} s |" in text


def test_a_load_that_is_not_the_checkpoint_is_refused_before_it_is_timed(tmp_path) -> None:
    folder = ensure("llama", 0.01, tmp_path / "checkpoints")
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    with files(changed)[0].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    done = bench(tmp_path, "--models", "llama", "--against", str(changed))
    assert done.returncode == 1
    assert "1 of 39 tensors are wrong:" in done.stderr
    assert "model.norm.weight: differs from the checkpoint" in done.stderr
    assert "native:" not in done.stdout
    assert not (tmp_path / "results").exists()
