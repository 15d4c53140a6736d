"""Ranks with shares of their own: the numbers of one process, the bytes of the shares, and saves for any others."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import tp_transformers
from tests.distributed.test_architectures import assert_as_outlined, compare_and_save
from tests.distributed.test_compiled import check
from tests.features.peft.distributed.test_adapters import train_all
from tests.features.quantized.distributed.test_quantized import (
    VARIANTS,
    check_decoded,
    check_packed,
    packed_folder,
)
from tests.support.architectures import ARCHITECTURES, GRADIENT_TOLERANCE, LOGITS_TOLERANCE, Variant
from tests.support.comparisons import assert_as_one_process, assert_same_files, equal_parameters, relative
from tests.support.models import load, logits_of, with_shares
from tests.support.pool import WorkerError
from tests.support.tiers import wide
from tests.support.training import LOSS_TOLERANCE, WEIGHT_TOLERANCE, with_trainer
from tp_transformers.strategies import ColwiseParallel, RowwiseParallel

SHARES: list[Sequence[float]] = [[2, 1], [3, 1], [1, 2, 1], [5, 3, 1], [2, 1, 1, 4]]
KINDS = ["llama", "mixtral", "phi3", "gpt_oss", "t5", "deepseek_v3", "olmo2", "falcon"]


def random_cases(count: int) -> list[tuple[str, Variant, list[float]]]:
    """Any architecture, heads and shares, from 1 to 9 by rank or with fractions."""
    draw = random.Random(0)
    cases = []
    for _ in range(count):
        name = draw.choice(sorted(ARCHITECTURES))
        size = draw.choice([2, 3, 4])
        shares = [draw.choice([draw.randint(1, 9), round(draw.uniform(0.1, 9), 2)]) for _ in range(size)]
        cases.append((name, draw.choice(ARCHITECTURES[name].variants), shares))
    return cases


def fixed_cases() -> list[tuple[str, Variant, Sequence[float]]]:
    """Every kind with every shares; odd heads. Every fourth is quick, with other shares for each kind."""
    cases = [(name, ARCHITECTURES[name].variants[-1], shares) for name in KINDS for shares in SHARES]
    return sorted(cases, key=lambda case: (KINDS.index(case[0]) - SHARES.index(case[2])) % len(SHARES))


def check_quantised(packed: str, plain: str, variant: str) -> None:
    """Run on every rank: decoded and packed weights."""
    check_decoded(packed, plain, variant, torch.bfloat16)
    check_packed(packed)


@pytest.mark.parametrize(
    ("name", "variant", "shares"), [*wide(fixed_cases(), len(KINDS) - 2), *wide(random_cases(40), 1)], ids=str
)
def test_any_shares_match_one_process(pool, made, name, variant, shares) -> None:
    case, size = made(name, variant), len(shares)
    with tempfile.TemporaryDirectory() as saved:
        results = pool.run(size, compare_and_save, name, case.folder, case.reference, saved, shares)
        for result in results:
            assert_as_one_process(result, LOGITS_TOLERANCE, GRADIENT_TOLERANCE)
        assert_as_outlined(case, size, results, shares)
        assert_same_files(case.folder, saved)


def save(folder: str, target: str, shares: Sequence[float]) -> None:
    tp_transformers.save_sharded(load(folder, tp_shares=shares), target)


LOADS: list[tuple[int, Sequence[float] | None, Any]] = [
    (2, None, (3, 1)),
    (2, [1, 3], (1, 3)),
    (3, None, None),
    (2, [3, 1], (3, 1)),
    (2, [1, 1], (1, 1)),
    (3, [1, 1, 2], (1, 1, 2)),
    (1, None, None),
]
"""Loads of a checkpoint of ranks with shares 3 : 1: ranks, shares that are asked for, shares of the loaded model."""


def load_saved(folder: str, saved: str, shares: Sequence[float] | None) -> dict[str, Any]:
    """Run on every rank: a pre-sharded checkpoint beside the ordinary one."""
    model, expected = load(saved, tp_shares=shares), load(folder, tp_shares=shares)
    return {
        "equal": equal_parameters(model, expected),
        "shares": model.tp_report.tp_shares,
        "own file": model.tp_report.reads <= 2 and model.tp_report.mapped == model.tp_report.share,
    }


@pytest.mark.parametrize("loads", wide([LOADS[:3], LOADS[3:]], 1))
def test_a_pre_sharded_checkpoint_keeps_its_shares_and_loads_with_any_others(pool, made, tmp_path, loads) -> None:
    folder, saved = made("llama", (9, 3)).folder, str(tmp_path / "saved")
    pool.run(2, save, folder, saved, [3, 1])
    for size, shares, expected in loads:
        for found in pool.run(size, load_saved, folder, saved, shares):
            assert found["equal"]
            assert found["shares"] == expected
            assert found["own file"] == (expected == (3, 1)) or size == 1


BAD: list[tuple[list[Any], str]] = [
    ([[2, 1], [1, 2]], "MeshError: tp_shares: got (2, 1) on rank 0 and (1, 2) on rank 1"),
    ([[2, 1], None], "MeshError: tp_shares: got (2, 1) on rank 0 and None on rank 1"),
    (["memory", "speed"], "MeshError: tp_shares: got 'memory' on rank 0 and 'speed' on rank 1"),
    ([[2, 1, 1]] * 2, "PlanError: tp_shares: got 3 shares, expected 2, one for each of 2 ranks"),
    ([[2, 0]] * 2, "PlanError: tp_shares: got [2, 0], expected a positive number for each rank"),
    (["most"] * 2, "PlanError: tp_shares: got 'most', expected a positive number for each rank"),
    ([[2, float("nan")]] * 2, "PlanError: tp_shares: got [2, nan], expected a positive number"),
]
"""(shares that each rank asks for, the error)."""


def ask_badly(folder: str) -> list[str]:
    """Run on every rank: the errors of loads in which this rank asks for shares of its own."""
    errors = []
    for shares, _ in BAD:
        with pytest.raises(tp_transformers.TensorParallelError) as caught:
            load(folder, tp_shares=shares[int(os.environ["RANK"])])
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


def test_bad_shares_are_one_error(pool, made) -> None:
    first, second = pool.run(2, ask_badly, made("llama", (9, 3)).folder)
    assert first == second
    for error, (_, expected) in zip(first, BAD, strict=True):
        assert error.startswith(expected)


def measured(folder: str, kind: str, numbers: Sequence[Any]) -> Any:
    """Run on every rank: the report of a load on devices with these measured numbers, and its logits."""
    own = numbers[int(os.environ["RANK"])]
    name = {"memory": "free_memory", "speed": "seconds_of_products"}[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"tp_transformers.features.shares.measures.{name}", lambda *_: own)
        model = load(folder, tp_shares=kind)
    return model.tp_report, logits_of(model)


def test_shares_by_speed_are_inverse_to_seconds(pool, made) -> None:
    case = made("llama", (9, 3))
    for report, logits in pool.run(2, measured, case.folder, "speed", [(0.001, 0.1), (0.002, 0.2)]):
        assert report.tp_shares == (667, 333)
        assert "split 667 : 333 (by speed: products in 1.00 and 100.00 ms, 2.00" in str(report)
        assert relative(logits, torch.load(case.reference)["logits"]) < LOGITS_TOLERANCE


def test_shares_by_memory_fill_each_device_alike(pool, made) -> None:
    case, memory = made("llama", (9, 3)), [800_000, 400_000, 400_000]
    for report, logits in pool.run(3, measured, case.folder, "memory", memory):
        filled = [held / room for held, room in zip(report.shares, memory, strict=True)]
        assert max(filled) < 1.1 * min(filled)
        assert "by memory: 800.0 kB, 400.0 kB, 400.0 kB free" in str(report)
        assert relative(logits, torch.load(case.reference)["logits"]) < LOGITS_TOLERANCE


def shares_of_copies(folder: str, kind: Any) -> Any:
    """Run on every rank: the shares of this rank's copy, of two, with other measured numbers on each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seconds = [(0.001, 0.1), (0.002, 0.2), (0.003, 0.3), (0.001, 0.1)][dist.get_rank()]
    shares = kind if kind == "speed" else kind[dist.get_rank() // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tp_transformers.features.shares.measures.seconds_of_products", lambda *_: seconds)
        model = load(folder, tp_shares=shares, device_mesh=mesh)
    tp_transformers.data_parallel(model, mesh)
    return model.tp_report.tp_shares


def test_copies_of_a_model_have_the_same_shares(pool, made) -> None:
    folder = made("llama", (9, 3)).folder
    assert pool.run(4, shares_of_copies, folder, "speed") == [(667, 333)] * 4
    with pytest.raises(
        WorkerError, match=r"MeshError: tp_shares: got \([13], [13]\) on rank 0 and \([13], [13]\) on rank 1"
    ):
        pool.run(4, shares_of_copies, folder, [[3, 1], [1, 3]])


def by_a_plan_of_styles(folder: str) -> None:
    """Run on every rank: load with a strategy that has shares of its own."""
    rules = {f"model.layers.*.mlp.{name}_proj": ColwiseParallel().with_shares([3, 1]) for name in ("gate", "up")}
    load(folder, tp_plan={**rules, "model.layers.*.mlp.down_proj": RowwiseParallel()})


def test_shares_of_one_strategy_in_a_plan_are_refused(pool, made) -> None:
    error = pool.error(2, by_a_plan_of_styles, made("llama", (9, 3)).folder)
    assert error.startswith("PlanError: ")
    assert "with_shares is for parallelize_module; a plan has one tp_shares for all rules" in error


def really_measured(folder: str) -> list[Any]:
    """Run on every rank: the shares of loads by what this machine has, which nothing is known of."""
    return [load(folder, tp_shares=kind).tp_report for kind in ("memory", "speed")]


def test_devices_are_measured(pool, made) -> None:
    reports = pool.run(2, really_measured, made("llama", (9, 3)).folder)
    for by_memory, by_speed in reports:
        assert "(by memory: " in str(by_memory)
        assert "(by speed: products" in str(by_speed)
        assert sum(by_memory.shares) == sum(by_speed.shares) == sum(reports[0][0].shares)


def split_mlp(shares: Sequence[float], expected_shapes: list[Any]) -> None:
    """Run on every rank: an MLP under torch's parallelize_module, split by shares, against the same unsplit."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6))
    x = torch.randn(3, 6)
    expected = mlp(x)
    styles = {"0": ColwiseParallel().with_shares(shares), "2": RowwiseParallel().with_shares(shares)}
    parallelize_module(mlp, mesh, styles)
    shapes = [tuple(tp_transformers.local_tensor(mlp.get_parameter(f"{index}.weight")).shape) for index in (0, 2)]
    assert relative(mlp(x), expected) < LOGITS_TOLERANCE
    assert shapes == expected_shapes[dist.get_rank()]


def test_styles_with_shares_in_torchs_parallelize_module(pool) -> None:
    shapes = [[(8, 6), (6, 8)], [(2, 6), (6, 2)]]
    pool.run(2, split_mlp, [3, 1], shapes)
    with pytest.raises(WorkerError, match="its shares are for 3 ranks, not for 2"):
        pool.run(2, split_mlp, [3, 1, 2], shapes)


@pytest.mark.parametrize(
    ("name", "variant", "shares"),
    wide(
        [
            ("gpt_oss", "mxfp4", [5, 3, 1]),
            ("llama", "gptq", [3, 1]),
            ("gpt_oss", "mxfp4", [2, 1, 1, 4]),
            ("qwen3_moe", "int8 by rows", [1, 2, 1]),
            ("qwen3_moe", "awq", [1, 3]),
        ],
        1,
    ),
    ids=str,
)
def test_quantised_weights_follow_shares(pool, tmp_path, name, variant, shares) -> None:
    packed, plain = map(str, packed_folder(tmp_path, name, VARIANTS[variant]))
    text = ",".join(map(str, shares))
    pool.run(len(shares), with_shares, text, check_quantised, packed, plain, variant)


@pytest.mark.slow
def test_adapters_follow_shares(pool, made, tmp_path) -> None:
    pool.run(2, with_shares, "3,1", train_all, made("llama", (9, 3)).folder, str(tmp_path))


@pytest.mark.slow
def test_compiled_models_follow_shares(pool, tmp_path) -> None:
    check(pool, tmp_path, 2, "llama", (9, 3), options={"tp_shares": (3, 1)})


def test_the_trainer_trains_by_shares(pool, cases, tmp_path) -> None:
    folder = cases(9, 3).folder
    (expected,) = pool.run(1, with_trainer, folder, str(tmp_path / "one"), 0, False)
    found = pool.run(2, with_shares, "3,1", with_trainer, folder, str(tmp_path / "two"), 1, False, False, False, True)
    for result in found:
        assert relative(result["losses"], expected["losses"]) < LOSS_TOLERANCE
        assert relative(result["predicted"], expected["predicted"]) < WEIGHT_TOLERANCE


SCRIPT = """
import os, resource, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM

small, folder, shares, *megabytes = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(small, tp_plan="auto")(torch.tensor([[5]]))  # all imports are done
fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
room = 1024 * int(fields["VmData"].split()[0]) + 10**6 * int(megabytes[int(os.environ["RANK"])])
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
options = {} if shares == "even" else {"tp_shares": shares}
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", tp_map=False, **options)
with torch.no_grad():
    logits = model(torch.tensor([[5, 17, 98]])).logits
if os.environ["RANK"] == "0":
    torch.save((logits, model.tp_report.shares), sys.argv[2] + "/found.pt")
"""


@pytest.mark.slow
def test_a_model_that_fits_by_memory_alone(made, tmp_path) -> None:
    """Three ranks of which two have half the memory; the model needs more than these have, if split evenly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
        head_dim=64, vocab_size=8000,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    small, folder = made("llama", (9, 3)).folder, str(tmp_path)

    def run(shares: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "tp_transformers", "run", "-n", "3", f"{folder}/script.py", small, folder, shares]
        return subprocess.run(
            [sys.executable, *command, "250", "105", "105"], capture_output=True, text=True, timeout=200, check=False
        )

    refused = run("even")
    assert refused.returncode
    assert "memory: got no more of it" in refused.stderr
    assert 'tp_shares="memory"' in refused.stderr
    loaded = run("memory")
    assert loaded.returncode == 0, loaded.stderr
    logits, held = torch.load(tmp_path / "found.pt")
    with torch.no_grad():
        assert relative(logits, model(torch.tensor([[5, 17, 98]])).logits) < LOGITS_TOLERANCE
    assert held[0] > 1.8 * held[1]
