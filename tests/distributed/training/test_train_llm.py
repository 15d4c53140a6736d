"""`benchmarks.train_llm` as a whole: what ranks train is what one process trains, and goes on on any other mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.meters import read_log
from benchmarks.processes import ROOT
from benchmarks.train_llm import parse, train
from tests.distributed.model.test_generate import letters
from tests.support.comparisons import read_folder, relative_errors
from tests.support.groups import join
from tests.support.models import llama_config
from tests.support.pool import Pool
from tp_transformers import TensorParallelError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOLERANCE = 1e-5
"""fp32, 6 steps: sums in another order; differences of 2e-7 (losses) and 3e-6 (weights) are seen."""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny Llama of 9 and 3 heads with its tokenizer, and how it is trained. On two ranks its shards are uneven."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = llama_config(9, 3, initializer_range=0.05, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    letters().save_pretrained(folder)
    text = ROOT / "tests" / "data" / "alice.txt"
    sizes = "--length 24 --batch 12 --steps 6 --warmup 2 --lr 1e-3 --save-final --accumulate 2"
    return ["--model", str(folder), "--text", str(text), *sizes.split()]


def run(options: list[str]) -> str:
    """Train in this process, as one of its ranks; what the error says, if one does."""
    try:
        train(parse(options), join())
    except TensorParallelError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(out: Path) -> dict[int, Any]:
    return {line["step"]: line for line in read_log(out / "log.jsonl") if "step" in line}


def assert_same_run(out: Path, reference: Path) -> None:
    """The same losses and gradient norms at every step, and the same weights at the end."""
    expected, found = steps(reference), steps(out)
    for step, line in found.items():
        for name in ("loss", "norm"):
            assert line[name] == pytest.approx(expected[step][name], rel=TOLERANCE), (name, step)
    errors = relative_errors(read_folder(out / "final"), read_folder(reference / "final"))
    assert max(errors.values()) < TOLERANCE, errors


def test_ranks_train_what_one_process_trains_and_another_mesh_goes_on(
    options: list[str], pool: Pool, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert not run([*options, "--out", str(one)])
    assert list(steps(one)) == [1, 2, 3, 4, 5, 6]
    assert steps(one)[6]["loss"] < steps(one)[1]["loss"] - 0.1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = ["-m", "benchmarks.train_llm", *options, "--tp", "2", "--save-every", "3", "--out", str(two)]
    done = subprocess.run([*torchrun, *program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{two}/log.jsonl, loss.png\n", "of rank 0 alone"
    assert "100%" in done.stderr, "the progress bar"
    assert (two / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in two.iterdir()) == ["final", "log.jsonl", "loss.png", "step-3", "step-6"]
    assert_same_run(two, one)
    line = steps(two)[6]
    assert line["seconds"].keys() == {"data", "forward", "backward", "clip", "optimizer", "step"}
    assert line["tokens_per_second"] == 12 * 24 / line["seconds"]["step"], "the batch's tokens, on however many ranks"
    assert line["memory"] > 50_000_000
    # Half way, one process, three ranks and four go on.
    for ranks, more in {1: "", 3: "--tp 3 --loss-parallel", 4: "--dp 2 --fsdp --sequence-parallel"}.items():
        out = tmp_path / f"resumed-{ranks}"
        again = [*options, "--resume", str(two / "step-3"), "--out", str(out), *more.split()]
        assert not any([run(again)] if ranks == 1 else pool.run(ranks, run, again))
        assert list(steps(out)) == [4, 5, 6]
        assert_same_run(out, one)
    # So do copies whose gradients are averaged, in the same folder.
    with (two / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 7}) + "\n")
    again = [*options, "--resume", str(two / "step-3"), "--out", str(two), "--dp", "2", "--tp", "1"]
    assert not any(pool.run(2, run, again))
    assert list(steps(two)) == [1, 2, 3, 4, 5, 6]
    assert "gradient sync" in steps(two)[6]["seconds"]
    assert_same_run(two, one)


def test_a_mistake_is_the_same_error_on_all_ranks(options: list[str], pool: Pool, tmp_path: Path) -> None:
    for more, error in {
        "--dp 3 --tp 2": "--dp and --tp: got 3 x 2, expected 2 ranks",
        "--length 60000": "the text: got 37467 tokens, expected at least one sequence of 60000",
        f"--resume {tmp_path}": f"--resume: got {tmp_path}, without a checkpoint",
    }.items():
        found = pool.run(2, run, [*options, *more.split(), "--out", str(tmp_path / "out")])
        assert all(text.startswith(f"UsageError: {error}") for text in found), found
    assert not (tmp_path / "out").exists()
