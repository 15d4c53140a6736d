"""`tp-transformers plan` and `plans`: what they print, as text and as JSON."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers import Gemma3TextConfig, LlamaConfig

from tests.features.planner.unit.test_speed import plan
from tests.support.architectures import ARCHITECTURES
from tests.support.commands import main
from tests.support.models import llama_config
from tp_transformers.errors import size, spans
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.memory import plan_memory
from tp_transformers.features.planner.plans import PROVEN_WITH, catalogue
from tp_transformers.features.planner.report import by_rank
from tp_transformers.plans import Plan
from tp_transformers.plans.yaml_file import available_plans

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The config of a Llama of 9 query and 3 KV heads and four layers."""
    llama_config(9, 3, num_hidden_layers=4, dtype="float32").save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.fixture(autouse=True)
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as wide as into a pipe: pytest-xdist sets COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_text_folds_layers_and_ranks(folder, capsys) -> None:
    code, out, _ = plan(capsys, folder, "--tp-size", "2", "--context", "8")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert code == 0
    assert "those of the config" in out
    assert lines["plan"] == "model_plans/llama.yaml"
    assert "layers.0-3" in lines
    assert lines["self_attn"] == "9/3 heads 6/2 heads (rank 0), 3/1 heads (rank 1)"
    assert lines["q_proj.weight"] == "72 x 72 48 x 72 (rank 0), 24 x 72 (rank 1) colwise"
    assert lines["up_proj.weight"] == "100 x 72 50 x 72 colwise"
    assert lines["norm.weight"] == "72 72 full: the strategy is replicate"
    assert "model.layers.0-3.self_attn: 8 tokens" in out
    assert "rank 1             3/1" in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_are_as_wide_as_the_terminal(folder, capsys, printed, monkeypatch, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(folder)
    _, out, _ = plan(capsys, ".", "--tp-size", "5", "--gpu-memory", "1MB")
    assert max(map(len, out.splitlines())) <= width
    assert width < 120 or "model.layers.0-3.self_attn: 64 tokens" in out
    assert out.index("query/KV") < out.index("it fits") < out.index("q_proj.weight"), "the memory comes first"
    lines = printed("plans").splitlines()
    assert max(map(len, lines[:-1])) <= width  # the last is a path
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, plan(capsys, ".", "--tp-size", "5")[1].splitlines())) <= 120  # a pipe


def test_an_invariant_plan_shards_outputs(tmp_path, capsys) -> None:
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    code, out, _ = plan(capsys, str(tmp_path), "--tp-size", "2", "--invariant")
    assert code == 0
    assert "down_proj.weight 4096 x 11008 2048 x 11008 invariant_rowwise" in " ".join(out.split())


def test_layers_that_differ_are_folded_apart(tmp_path, capsys) -> None:
    types = ["full_attention" if index == 2 else "sliding_attention" for index in range(6)]
    settings = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    config = Gemma3TextConfig(num_hidden_layers=6, layer_types=types, sliding_window=16, **settings)
    config.save_pretrained(tmp_path)
    (tmp_path / "plan.yaml").write_text(
        "extends: gemma3_text\nbase_model:\n  layers.*.mlp.down_proj: null\n  layers.*.mlp.gate_proj: null\n"
        "  layers.*.mlp.up_proj: null\n"
        + "".join(
            f"  layers.{index}.mlp.{name}_proj: {how}\n"
            for index in (0, 1, 4)
            for name, how in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
        )
    )
    _, out, _ = plan(capsys, str(tmp_path), "--tp-size", "2", "--context", "99", "--plan", str(tmp_path / "plan.yaml"))
    assert {"layers.0-1, 4", "layers.2-3, 5"} <= {line.strip().split("  ")[0] for line in out.splitlines()}
    assert "no rule covers it" in out
    assert "layers.0-1, 3-5.self_attn: 16 tokens" in out
    assert "layers.2.self_attn: 99 tokens" in out


def test_json_is_all_of_the_outline(folder, capsys) -> None:
    sizes = ["--tp-size", "5", "--batch", "2", "--context", "8", "--gpu-memory", "1MiB"]
    code, out, _ = plan(capsys, folder, *sizes, "--json", "--dtype", "bf16")
    said, expected = json.loads(out), plan_memory(survey(folder, dtype="bfloat16"), 5, batch=2, context=8)
    assert code == 0
    assert said["version"] == 1
    assert [rank["total_bytes"] for rank in said["ranks"]] == list(expected.total_bytes)
    assert [rank["kv_cache_bytes"] for rank in said["ranks"]] == list(expected.cache_bytes)
    assert [parameter["name"] for parameter in said["parameters"]] == [one.name for one in expected.parameters]
    for parameter in said["parameters"]:
        assert len(parameter["local_shapes"]) == 5
        if parameter["dim"] is not None:
            held = [sum(stop - start for start, stop in ranges) for ranges in parameter["ranges"]]
            assert held == [shape[parameter["dim"]] for shape in parameter["local_shapes"]]
    assert said["attention"][0]["local_query_heads"] == [2, 1, 2, 1, 3]
    assert said["dtype"] == "bfloat16"
    assert said["gpu_memory"] == 2**20
    assert said["fits"] is True
    assert said["smallest_tp_size"] == 1


def test_the_exit_code_says_whether_it_fits(folder, capsys) -> None:
    held = plan_memory(survey(folder), 2, context=8).total_bytes[0]
    arguments = [folder, "--context", "8", "--tp-size", "2", "--gpu-memory"]
    assert plan(capsys, *arguments, f"{held}B")[0] == 0
    code, out, _ = plan(capsys, *arguments, str(held - 1))
    assert code == 1
    assert "it does not fit" in out
    assert "ranks that fits: 3 ranks" in out
    assert "none up to 64 ranks" in plan(capsys, *arguments, "1 KB")[1]


def test_a_reader_that_has_seen_enough_is_no_error(folder, monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", folder, "--tp-size", "64", "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{folder}", "--tp-size", "0"], "--tp-size: got 0"),
        (["{folder}", "--tp-size", "2", "--batch", "0"], "--batch: got 0"),
        (["{folder}", "--tp-size", "2", "--gpu-memory", "lots"], "--memory: got 'lots'"),
        (["{folder}", "--tp-size", "2", "--gpu-memory", "0GB"], "--memory: got '0GB'"),
        (["{folder}", "--tp-size", "2", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["{folder}", "--tp-size", "2", "--plan", "no.yaml"], "plan no.yaml: got no such file"),
        (["/no/such/folder", "--tp-size", "2"], "got no such folder"),
        (["{empty}", "--tp-size", "2"], "got a folder without config.json"),
        (["{broken}", "--tp-size", "2"], "config.json"),
        (["{quantised}", "--tp-size", "2"], "a checkpoint quantised with hqq"),
    ],
)
def test_a_wrong_request_is_told_in_a_line(folder, tmp_path, capsys, arguments, says) -> None:
    folders = {name: str(tmp_path / name) for name in ("empty", "broken", "quantised")}
    for path in folders.values():
        Path(path).mkdir()
    Path(folders["broken"], "config.json").write_text("{")
    LlamaConfig(quantization_config={"quant_method": "hqq", "bits": 4}).save_pretrained(folders["quantised"])
    code, out, err = plan(capsys, *(argument.format(folder=folder, **folders) for argument in arguments))
    assert code == 2
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


def test_words() -> None:
    assert spans([4, 0, 1, 2, 7]) == "0-2, 4, 7"
    assert by_rank(["a", "a"]) == "a"
    assert by_rank(["a", "b", "a"]) == "a (ranks 0, 2), b (rank 1)"
    assert [size(nbytes) for nbytes in (0, 950, 1_250_000, 24 * 10**9)] == ["0", "0.9 kB", "1.2 MB", "24.00 GB"]


def test_plans_lists_every_plan(printed, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # nothing is folded
    said: dict[str, Any] = json.loads(printed("plans", "--json"))
    assert {name: Path(entry["file"]) for entry in said["plans"] for name in entry["model_types"]} == available_plans()
    for entry in said["plans"]:
        assert set(entry["strategies"]) == {rule.strategy_name for rule in Plan.from_yaml(entry["file"]).rules}
    lines = printed("plans").splitlines()
    assert all(any(line.startswith(entry.title) for line in lines) for entry in catalogue())


def test_complete_experts_are_said_with_the_load_of_the_fullest_rank(tmp_path, capsys, printed) -> None:
    ARCHITECTURES["mixtral"].make(8, 4).config.save_pretrained(tmp_path)
    rules = "".join(f"  layers.*.mlp.experts.{name}_proj: grouped_gemm\n" for name in ("gate_up", "down"))
    (tmp_path / "plan.yaml").write_text(f"extends: mixtral\nbase_model:\n{rules}")
    command = ["plan", str(tmp_path), "--tp-size", "3"]
    assert main([*command, "--plan", str(tmp_path / "plan.yaml")]) == 0
    line = "experts     2, 1, 1 of 4: with an even routing, the fullest rank computes 1.50 times the mean"
    assert line in capsys.readouterr().out
    assert "even routing" not in printed(*command)


def test_what_plans_were_proven_with_is_what_ci_runs() -> None:
    (older,) = re.findall(r'^make versions VERSIONS="(.+)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    *before, newest = PROVEN_WITH
    assert older.split() == before  # `make test` runs with the newest one
    assert list(PROVEN_WITH) == sorted(PROVEN_WITH, key=Version)
    (claimed,) = re.findall(r'^    "transformers([<>=].+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert all(release in SpecifierSet(claimed) for release in PROVEN_WITH)
    assert f">={PROVEN_WITH[0].rpartition('.')[0]}," in claimed
    constraints = (ROOT / ".ci" / "constraints.txt").read_text()
    (tested,) = re.findall(r"^transformers==(.+)$", constraints, re.MULTILINE)  # by `make test`
    assert tested in PROVEN_WITH or Version(tested) > Version(newest)
    assert "pytest.mark.slow" not in (ROOT / "tests/distributed/test_architectures.py").read_text()
    assert "tests/distributed/test_architectures.py" in (ROOT / "Makefile").read_text()  # RELEASE_TESTS
    assert 'pytest -m "not slow or trl" -n 2' in (ROOT / ".ci" / "versions").read_text()
