"""The parts of `benchmarks.train_llm`: the order of batches, arguments, meters, and what tells runs apart."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import trainee
from benchmarks.corpus import Corpus, read_dataset
from benchmarks.meters import Log, Stopwatch, operations_per_token, peak_operations, read_log
from benchmarks.train_llm import check, multiplied, parse
from tp_transformers.errors import UsageError
from tp_transformers.ranks.group import TensorParallelGroup

CPU = torch.device("cpu")


def test_each_sequence_is_drawn_once_an_epoch_by_seed_and_step_alone() -> None:
    tokens = torch.arange(7 * 5 + 3)
    corpus = Corpus(tokens, 5, seed=1)
    drawn = torch.cat([corpus.batch(step, 4) for step in range(7)])  # 4 epochs of 7
    for epoch in drawn.view(4, 7, 5):
        assert torch.equal(epoch[epoch[:, 0].argsort()].flatten(), tokens[:35])
    assert not torch.equal(drawn[:7], drawn[7:14])
    assert torch.equal(Corpus(tokens, 5, seed=1).batch(5, 4), drawn[20:24]), "it depends on the steps before"
    assert not torch.equal(Corpus(tokens, 5, seed=2).batch(5, 4), drawn[20:24])
    with pytest.raises(UsageError, match="the text: got 38 tokens, expected at least one sequence of 39"):
        Corpus(tokens, 39, seed=1)


def test_without_the_library_a_data_set_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"--dataset: got a Python without .* pip install datasets"):
        read_dataset(None, "org/set", "train", "text")


def test_arguments_are_held_against_the_ranks() -> None:
    def found(ranks: int, *options: str) -> tuple[int, int, int]:
        arguments = parse(["--model", "m", "--text", "t", *options])
        copies = check(arguments, TensorParallelGroup(None, 0, ranks, CPU))
        return arguments.dp, arguments.tp, copies

    assert found(1) == (1, 1, 1)
    assert found(6) == (1, 6, 1)
    assert found(6, "--dp", "2", "--batch", "6") == (2, 3, 2)
    assert found(6, "--tp", "2", "--batch", "6") == (3, 2, 3)
    with pytest.raises(UsageError, match=r"--dp and --tp: got 2 x 2, expected 6 ranks.*--nproc-per-node 4"):
        found(6, "--dp", "2", "--tp", "2")
    with pytest.raises(UsageError, match="--batch: got 6 sequences, expected a multiple of 2 x 2"):
        found(4, "--dp", "2", "--batch", "6", "--accumulate", "2")
    with pytest.raises(UsageError, match="--loss-parallel: got one process"):
        found(1, "--loss-parallel")


def test_the_latest_whole_checkpoint_is_found(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"--resume: got .*, without a checkpoint"):
        trainee.latest(tmp_path)
    for step in (5, 10, 15):
        (tmp_path / f"step-{step}").mkdir()
    for step in (5, 10):  # the last was not written to its end
        (tmp_path / f"step-{step}" / ".metadata").touch()
    assert trainee.latest(tmp_path).name == "step-10"
    assert trainee.latest(tmp_path / "step-5").name == "step-5"


def test_a_step_is_the_sum_of_its_parts(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    watch = Stopwatch(CPU)
    for seconds in (1, 10):
        clock[0] += seconds
        watch.mark("forward")
        clock[0] += 100 * seconds
        watch.mark("backward")
    clock[0] += 5
    watch.mark("backward")
    expected = {"forward": 11, "backward": 1100 + 5}
    assert watch.lap() == {**expected, "step": sum(expected.values())}
    assert watch.lap() == {"step": 0}


def test_operations_are_those_of_matrix_products_counted_by_torch() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, tie_word_embeddings=False, attn_implementation="eager")
    model, length = LlamaForCausalLM(config), 16
    ids = torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    norms = sum(param.numel() for name, param in model.named_parameters() if "norm" in name)  # which multiply no matrix
    counted = counter.get_total_flops() / ids.numel()
    # Some releases of transformers make the positions' angles by a matrix product, too.
    assert operations_per_token(multiplied(model) - norms, config, length) == pytest.approx(counted, rel=1e-4)
    tied = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    assert multiplied(tied) == multiplied(model) < model.num_parameters()


def test_gpus_are_known_by_name() -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L40S", "NVIDIA L40", "NVIDIA L4", "NVIDIA A10"]
    assert [peak_operations(name) for name in names] == [989e12, 756e12, 362e12, 181e12, 121e12, None]


def test_a_log_goes_on_where_the_checkpoint_was(tmp_path) -> None:
    path = tmp_path / "out" / "log.jsonl"
    log = Log(path, {"tp": 2}, 1)
    for step in (1, 2, 3):
        log.write({"step": step})
    Log(path, {"tp": 3}, 3).write({"step": 3, "again": True})
    assert read_log(path) == [
        {"run": {"tp": 2}},
        {"step": 1},
        {"step": 2},
        {"run": {"tp": 3}},
        {"step": 3, "again": True},
    ]
    Log(path, {"tp": 1}, 1)
    assert read_log(path) == [{"run": {"tp": 1}}]
