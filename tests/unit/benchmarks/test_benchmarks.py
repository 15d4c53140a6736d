"""The benchmark's parts: a wrong shard is told, every page is touched, ratios are what they say, processes end."""

from __future__ import annotations

import json
import mmap
import shutil
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import tp_transformers
from benchmarks import machine, processes
from benchmarks.check import WrongResultError, check
from benchmarks.checkpoints import KINDS, config_of, ensure, files, matrices, nbytes
from benchmarks.forward import SCENARIOS
from benchmarks.memory import shard_bytes, touch
from benchmarks.report import summarise
from tests.support.tiers import wide

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("model_type", wide(KINDS, 1))
def test_a_checkpoint_loads_and_one_changed_byte_of_it_is_told(model_type, tmp_path) -> None:
    folder = ensure(model_type, 0.01, tmp_path)
    assert ensure(model_type, 0.01, tmp_path) == folder, "it is written once"
    with tp_transformers.enable():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, tp_plan="auto", dtype="auto", output_loading_info=True
        )
    assert not any(info.values())
    for collectives in (False, True):
        count = check(model, folder, rank=0, size=1, collectives=collectives)
        assert count == len(model.state_dict())
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    file = files(changed)[-1]
    header = int.from_bytes(file.read_bytes()[:8], "little")
    entries = json.loads(file.read_bytes()[8 : 8 + header])
    name = next(name for name in entries if "down_proj" in name or "experts.5.w2" in name)
    with file.open("r+b") as opened:
        opened.seek(8 + header + entries[name]["data_offsets"][1] - 1)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 0x80]))
    for collectives in (False, True):
        with pytest.raises(WrongResultError, match=r"1 of \d+ tensors are wrong:\n.*down_proj.* differs"):
            check(model, changed, rank=0, size=1, collectives=collectives)


@pytest.mark.parametrize(("model_type", "hidden", "layers"), [("llama", 4096, 7), ("mixtral", 4096, 1)])
def test_four_gigabytes_have_the_real_widths(model_type, hidden, layers) -> None:
    config = config_of(model_type, 4)
    assert (config.hidden_size, config.num_hidden_layers) == (hidden, layers)
    assert config.intermediate_size == 14336
    assert 3e9 < nbytes(config, "") <= 4e9


def test_files_end_at_their_size_and_are_safetensors(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.checkpoints.FILE_BYTES", 3_000_000)
    folder = ensure("llama", 0.01, tmp_path)
    assert len(files(folder)) > 2
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shapes = dict(matrices(config_of("llama", 0.01)))
    assert weight_map.keys() == shapes.keys()
    for file in files(folder):
        assert file.stat().st_size < 3_100_000
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                assert weight_map[name] == file.name
                tensor = opened.get_tensor(name)
                assert tensor.shape == shapes[name]
                assert tensor.dtype == torch.bfloat16
                if "norm" in name:
                    continue
                assert (tensor.abs() >= 2**-7).all()
                assert (tensor.abs() < 2**-6).all()
                assert (tensor < 0).float().mean().sub(0.5).abs() < 0.25


@pytest.mark.parametrize(
    "view",
    [
        lambda storage: storage[100:-100].view(torch.int16)[: 5 * PAGE // 2],
        lambda storage: storage.view(24, PAGE // 2)[:, 100:600],
        lambda storage: storage.view(3, 4 * PAGE)[:, PAGE - 7 : 3 * PAGE],
        lambda storage: storage.view(24, PAGE // 2)[:, 100:600].T,
        lambda storage: storage.view(3, 2, 2 * PAGE)[:, 1].permute(1, 0),
    ],
)
def test_touch_reads_a_byte_of_every_page(view) -> None:
    storage = torch.zeros(12 * PAGE, dtype=torch.uint8)
    tensor = view(storage)
    assert touch([tensor]) == 0
    tensor.copy_(torch.full_like(tensor, -1 if tensor.dtype == torch.int16 else 255))
    used = storage.bool()
    storage.zero_()
    first = storage.data_ptr() // PAGE * PAGE - storage.data_ptr()
    pages = [(max(start, 0), start + PAGE) for start in range(first, len(storage), PAGE)]
    pages = [(start, stop) for start, stop in pages if used[start:stop].any()]
    assert len(pages) > 3
    for start, stop in pages:
        storage[start:stop] = 1
        assert touch([tensor]) > 0, f"bytes {start} to {stop}"
        storage.zero_()


def test_a_shard_in_a_mapped_file_is_not_anonymous(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    mapped = torch.from_file(str(path), shared=False, size=8 * PAGE, dtype=torch.uint8)
    memory = torch.zeros(100 * PAGE, dtype=torch.uint8)
    assert shard_bytes([mapped, memory, memory[:], torch.empty(0)]) == (108 * PAGE, 100 * PAGE)
    assert touch([mapped, memory]) == 0


def test_a_warm_file_is_in_the_page_cache(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE + 5))
    machine.warm([path])
    assert machine.resident(path) == 3 * PAGE + 5


def test_ratios_are_of_pairs_and_the_slowest_rank_counts() -> None:
    def run(*seconds: float) -> list[dict[str, Any]]:
        return [
            {"load": each, "forward": 1.0, "shard": 100, "anonymous_shard": 90, "anon_start": 10, "anon_peak": 100}
            for each in seconds
        ]

    runs = {"native": [run(4, 8), run(6, 2), run(9, 1)], "ours": [run(2, 1), run(1, 3), run(1, 1)]}
    found = summarise(runs, ["load", "first_forward", "anonymous"])
    assert found["load"]["native"]["values"] == [8, 6, 9]
    ratio = found["load"]["ratio"]
    assert ratio["values"] == [4, 2, 9]
    assert [ratio[name] for name in ("min", "median", "max")] == [2, 4, 9]
    assert found["first_forward"]["ours"]["values"] == [3, 4, 2]
    assert found["anonymous"]["ratio"] is None, "nothing is no divisor"


@pytest.mark.parametrize("copy", wide([False, True], 1))
def test_a_process_that_fails_is_shown_and_the_others_are_ended(copy, monkeypatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.5)

    def run(timeout: float, *commands: str) -> list[Any]:
        jobs = [{"args": command.split()} for command in commands]
        return processes.run("subprocess:check_call", jobs, timeout=timeout, copy=copy)

    with pytest.raises(processes.ProcessError) as caught:
        run(500, "sleep 600", "false")
    assert "process 0: still running, was ended" in str(caught.value)
    assert "process 1: exit code 1" in str(caught.value)
    assert "CalledProcessError" in str(caught.value)
    with pytest.raises(processes.ProcessError, match="process 0: still running, was ended"):
        run(1, "sleep 600")
    assert run(60, "true") == [0]


def test_names_of_scenarios_can_be_listed() -> None:
    assert ",".join(SCENARIOS).split(",") == list(SCENARIOS)
