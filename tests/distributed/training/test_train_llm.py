"""`benchmarks.train_llm` as a whole: what ranks train is what one process trains, and goes on on any other mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.corpus import Corpus, read_text
from benchmarks.meters import read_log
from benchmarks.processes import ROOT
from benchmarks.train_llm import parse, train
from tests.distributed.model.test_generate import letters
from tests.support.comparisons import read_folder, relative_errors
from tests.support.groups import join
from tests.support.models import llama_config
from tp_transformers import TensorParallelError

pytestmark = pytest.mark.slow

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


def test_ranks_train_what_one_process_trains_and_another_mesh_goes_on(options, pool, tmp_path) -> None:
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
    assert_same_run(two, one)


def test_a_mistake_is_the_same_error_on_all_ranks(options, pool, tmp_path) -> None:
    for more, error in {
        "--dp 3 --tp 2": "--dp and --tp: got 3 x 2, expected 2 ranks",
        "--length 60000": "the text: got 37467 tokens, expected at least one sequence of 60000",
        f"--resume {tmp_path}": f"--resume: got {tmp_path}, without a checkpoint",
    }.items():
        found = pool.run(2, run, [*options, *more.split(), "--out", str(tmp_path / "out")])
        assert all(text.startswith(f"UsageError: {error}") for text in found), found
    assert not (tmp_path / "out").exists()


RECORD = ROOT / "tests" / "data" / "exactness.json"
SETTING = {"steps": 5, "batch": 2, "length": 16}


def first_norm(folder: Path) -> float:
    """The norm in fp64 of the gradients of the first step, which one process computes in fp32.

    A sum of 28 million squares in fp32, those of the gradient of the embedding, loses digits.
    """
    text = read_text(AutoTokenizer.from_pretrained(folder), ROOT / "tests" / "data" / "alice.txt")
    batch = Corpus(text, SETTING["length"], 0).batch(0, SETTING["batch"])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    plain(batch, labels=batch, use_cache=False).loss.backward()
    return (
        torch.stack([param.grad.double().norm() for param in plain.parameters() if param.grad is not None])
        .norm()
        .item()
    )


def test_losses_and_norms_by_ranks(smollm2, pool, tmp_path) -> None:
    """The table of README.md. `RECORD=1` writes the numbers, from which `python -m tests.support.readme` makes it."""
    sizes = [f"--{name}={value}" for name, value in {**SETTING, "warmup": 2}.items()]
    options = ["--model", str(smollm2), "--text", str(ROOT / "tests" / "data" / "alice.txt"), *sizes]

    def numbers(out: Path) -> dict[str, Any]:
        lines = steps(out).values()
        return {"losses": [line["loss"] for line in lines], "norms": [line["norm"] for line in lines]}

    assert not run([*options, "--out", str(tmp_path / "one")])
    one, ranks = numbers(tmp_path / "one"), {}
    for size, more in ((2, ""), (3, ""), (4, ""), (3, "--invariant")):
        out = tmp_path / f"{size}{more}"
        assert not any(pool.run(size, run, [*options, *more.split(), "--out", str(out)]))
        found = numbers(out)
        worst = {
            name: max(abs(ours - theirs) / theirs for ours, theirs in zip(found[key], one[key], strict=True))
            for name, key in (("loss", "losses"), ("norm", "norms"))
        }
        assert max(worst.values()) <= 1e-4 * (not more), worst  # fp32 sums in another order, of few steps
        ranks[f"{size}, `tp_invariant=True`" if more else str(size)] = found | worst
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    result = {
        "versions": versions,
        "setting": SETTING,
        "first_norm_fp64": first_norm(smollm2),
        "one": one,
        "ranks": ranks,
    }
    if os.environ.get("RECORD"):
        RECORD.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert recorded["ranks"].keys() == ranks.keys()
    assert recorded["one"]["losses"] == pytest.approx(one["losses"], rel=1e-4)  # other machines, other sums
