"""Speeds that `tp-transformers plan` predicts: the model by hand, devices by their names and figures, the report."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig

from tests.support.commands import main
from tp_transformers.errors import PlanError
from tp_transformers.features.planner import measured, speed
from tp_transformers.features.planner.devices import GPUS, Device
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.memory import MemoryPlan, plan_memory, replan
from tp_transformers.features.planner.speed import Times, compare, speed_of, with_fast_shares

WIDTHS = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "dtype": "float32", "tie_word_embeddings": False}
SLOW = Device("slow", 0, bandwidth=1e6, flops=1e6, link=1e6, latency=1e-3, gap=1e-2)
A_LAYER = 4 * 8 * 8 + 3 * 8 * 16
"""Elements of the matrices of a layer."""
GPU = {"bandwidth": 0.85 * 1008e9, "flops": 0.7 * 165e12, "link": 0.85 * 32e9}
"""What is counted on of an RTX 4090."""


def planned(tmp_path: Path, config: PretrainedConfig, size: int, **options: Any) -> MemoryPlan:
    config.save_pretrained(tmp_path)
    return plan_memory(survey(str(tmp_path)), size, **options)


def tiny(tmp_path: Path, size: int, **options: Any) -> MemoryPlan:
    return planned(tmp_path, LlamaConfig(**WIDTHS, **HEADS), size, **options)


def large(tmp_path: Path) -> str:
    """The config of a Llama of 8 billion parameters."""
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    LlamaConfig(
        **widths, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16", max_position_embeddings=8192
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command."""
    code = main(["plan", *arguments])
    return code, *capsys.readouterr()


def test_one_rank_by_hand(tmp_path) -> None:
    found = speed_of(tiny(tmp_path, 1, context=4), [SLOW])
    weights = 4 * (2 * (A_LAYER + 2 * 8) + 8 + 10 * 8)  # norms, and the head; of the embedding, one row is read
    keys_and_values = 2 * 4 * 2 * 8 * 4  # layers, tokens, kinds, features, bytes
    decoded = 2 * (2 * A_LAYER + 80) + 2 * 4 * 4 * 8  # linears; scores and sums over 4 tokens in 2 layers
    assert found.decode == pytest.approx(((weights + keys_and_values) / 1e6, decoded / 1e6, 0, 0.02))
    prompt = 2 * 4 * 2 * A_LAYER + 2 * 80 + 2 * 4 * 4 * 2 * 8  # the last token alone has logits
    assert found.prefill == pytest.approx((weights / 1e6, prompt / 1e6, 0, 0.02))
    assert found.decoded == pytest.approx(1 / (0.02 + (weights + keys_and_values) / 1e6))
    assert found.prefilled == pytest.approx(4 / (0.02 + prompt / 1e6))


def test_two_ranks_by_hand(tmp_path) -> None:
    decode = speed_of(tiny(tmp_path, 2, batch=3, context=4), [SLOW, SLOW]).decode
    weights = 4 * (2 * (A_LAYER / 2 + 2 * 8) + 8 + 10 * 8 / 2)
    assert decode.reads == pytest.approx((weights + 3 * 256) / 1e6)
    sent = 5 * 3 * 8 * 4 + 3 * 10 * 4 / 2  # 2 sums a layer and of the embedding, half of the logits
    assert decode.sums == pytest.approx(6e-3 + sent / 1e6)


def test_the_slowest_of_unlike_devices_decides(tmp_path) -> None:
    memory = tiny(tmp_path, 2)
    fast = Device("fast", 0, bandwidth=1e7, flops=1e7, link=1e7, latency=1e-4, gap=1e-3)
    assert speed_of(memory, [fast, SLOW]).decode == speed_of(memory, [SLOW, SLOW]).decode
    assert speed_of(memory, [fast, fast]).decode.seconds < 0.2 * speed_of(memory, [SLOW, SLOW]).decode.seconds


@pytest.mark.parametrize(("batch", "read"), [(1, 0.5), (2, 0.75), (3, 0.875)])
def test_experts_are_read_if_a_token_chooses_them(tmp_path, batch, read) -> None:
    config = MixtralConfig(**WIDTHS, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    decode = speed_of(planned(tmp_path, config, 1, batch=batch), [SLOW]).decode
    experts, rest = 2 * 4 * 3 * 8 * 16, 2 * (4 * 64 + 4 * 8 + 2 * 8) + 8 + 80
    assert decode.reads == pytest.approx(4 * (read * experts + rest) / 1e6)
    assert decode.products == pytest.approx(2 * batch * (0.5 * experts + 2 * (4 * 64 + 4 * 8) + 80) / 1e6)


def test_the_bound_is_the_largest_part() -> None:
    assert Times(3, 2, 1, 0).bound == "memory"
    assert Times(1, 2, 3, 0).bound == "all-reduces"
    assert Times(3, 2, 1, 4).seconds == 8


def test_shares_for_speed_are_within_memory(tmp_path) -> None:
    memory = plan_memory(survey(large(tmp_path)), 3)
    one, half, small = (Device(str(speed), 0, speed * 1e12, 1e14, 1e10, 1e-5) for speed in (1.0, 0.5, 0.25))
    held = with_fast_shares(memory, [one, half, small]).parameter_bytes
    assert held[0] / held[1] == pytest.approx(2, rel=0.02)
    assert held[1] / held[2] == pytest.approx(2, rel=0.02)
    limited = Device("1.0", 6 * 10**9, 1e12, 1e14, 1e10, 1e-5)
    held = with_fast_shares(memory, [limited, half, small]).parameter_bytes
    assert 5.7e9 < held[0] <= 6e9, "as much as fits, since it is the fastest"
    assert held[1] / held[2] == pytest.approx(2, rel=0.02)


def test_a_number_of_ranks_that_the_plan_does_not_fit_is_left_out(tmp_path, monkeypatch) -> None:
    def refuse(planned: MemoryPlan, **options: Any) -> MemoryPlan:
        if options["size"] == 6:
            raise PlanError("6 ranks", got="8 features", expected="fewer ranks", fix="Take fewer.")
        return replan(planned, **options)

    monkeypatch.setattr(speed, "replan", refuse)
    found = compare(tiny(tmp_path, 2), [SLOW, SLOW])
    assert [one.planned.size for one in found] == [1, 2, 3, 4, 8]


def test_a_gpu_by_its_name(tmp_path, capsys) -> None:
    folder = large(tmp_path)
    code, out, _ = plan(capsys, folder, "--tp-size", "2", "--device", "rtx4090", "--json")
    rows = json.loads(out)["speeds"]
    assert code == 0
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4, 6, 8]
    head, layer = 4096 * 128256, 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    nbytes = 2 * (32 * (layer + 2 * 4096) + 4096 + head) + 4096 * 32 * 2 * 2 * 1024
    assert rows[0]["decode"]["reads_seconds"] == pytest.approx(nbytes / GPU["bandwidth"])
    assert rows[0]["decode"]["tokens_per_second"] == pytest.approx(1 / (nbytes / GPU["bandwidth"] + 32 * 70e-6))
    assert rows[1]["decode"]["sums_seconds"] == pytest.approx(66 * 25e-6 + (65 * 8192 + 128256) / GPU["link"])
    assert rows[0]["prefill"]["bound"] == "products"
    assert json.loads(out)["gpu_memory"] == 24 * 10**9, "the memory of the device is that of each rank"


def test_figures_of_a_data_sheet(tmp_path, capsys) -> None:
    said = [
        json.loads(plan(capsys, large(tmp_path), "--tp-size", "2", "--json", "--device", device)[1])["speeds"]
        for device in ("24GB:1008GB:165T:32GB:25", "RTX 4090")
    ]
    assert [row["decode"] for row in said[0]] == [row["decode"] for row in said[1]]
    assert [row["prefill"] for row in said[0]] == [row["prefill"] for row in said[1]]


def test_unlike_devices_have_shares_for_speed(tmp_path, capsys) -> None:
    code, out, _ = plan(capsys, large(tmp_path), "--device", "RTX 4060,RTX 4090,RTX 4070 Ti")
    assert code == 0
    assert "1 rank: RTX 4090  " in out
    assert "2 ranks: RTX 4090, RTX 4070 Ti  " in out
    assert "3 ranks: RTX 4060, RTX 4090, RTX 4070 Ti  " in out
    assert "decode is fastest on 3 ranks with tp_shares=[1" in out
    code, out, _ = plan(capsys, str(tmp_path), "--device", "RTX 4060,RTX 4060,RTX 4060", "--context", "8192")
    assert [line.split()[-1] for line in out.splitlines() if "RTX 4060" in line][:3] == ["no", "no", "yes"]


def test_memory_replaces_that_of_devices(tmp_path, capsys) -> None:
    arguments = ["--device", "RTX 4090", "--memory", "24GB,6GB", "--json"]
    said = json.loads(plan(capsys, large(tmp_path), *arguments)[1])
    held = [rank["total_bytes"] for rank in said["ranks"]]
    assert 5.7e9 < held[1] <= 6e9 < held[0]


def test_the_fastest_number_of_ranks_is_named(tmp_path, capsys) -> None:
    slow_link = ["--tp-size", "2", "--device", "80GB:2039GB:312T:300GB:300"]
    assert "decode is fastest on 1 rank, bound by memory" in plan(capsys, large(tmp_path), *slow_link)[1]
    quick_link = ["--tp-size", "2", "--device", "80GB:2039GB:312T:300GB:40"]
    assert "decode is fastest on 8 ranks, bound by" in plan(capsys, str(tmp_path), *quick_link)[1]


def test_this_machine_is_measured(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(measured, "WIDTH", 256)
    monkeypatch.setattr(measured, "SECONDS", 0.01)
    LlamaConfig(**WIDTHS, **HEADS).save_pretrained(tmp_path)
    code, out, _ = plan(capsys, str(tmp_path), "--tp-size", "3", "--device", "cpu", "--json")
    rows = json.loads(out)["speeds"]
    assert code == 0
    assert rows[-1]["ranks"] == 3
    assert all(
        seconds > 0 for row in rows for seconds in (row["decode"]["reads_seconds"], row["decode"]["gaps_seconds"])
    )
    assert rows[-1]["devices"] == ["cpu"] * 3
    (device,) = measured.this_machine(1, torch.bfloat16, packed=True, experts=True)
    assert device.packed is None or min(device.packed) > 0
    assert device.gap > 0


def test_threads_measure_many_tokens_once_all_have_measured_one(monkeypatch) -> None:
    spans: list[tuple[int, float, float]] = []
    delays = itertools.cycle([0.0, 0.1, 0.2])

    def timed(call: Any, device: torch.device) -> float:
        tokens, begin = len(call()), time.perf_counter()
        time.sleep(next(delays))
        spans.append((tokens, begin, time.perf_counter()))
        return 1.0

    monkeypatch.setattr(measured, "_seconds", timed)
    monkeypatch.setattr(measured, "WIDTH", 64)
    monkeypatch.setattr(measured, "UNCACHED", 1)
    measured._rates.__wrapped__(3, torch.float32)
    assert sorted(tokens for tokens, _, _ in spans) == [1] * 3 + [measured.TOKENS] * 3
    assert max(end for tokens, _, end in spans if tokens == 1) < min(begin for tokens, begin, _ in spans if tokens > 1)


def test_packed_weights_are_read_at_a_speed_of_their_own(tmp_path) -> None:
    config = LlamaConfig(**WIDTHS, **HEADS)
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    config.save_pretrained(tmp_path)
    planned = plan_memory(survey(str(tmp_path), packed=True), 1)
    device = Device("one", 0, 1e9, 1e12, 1e9, 0.0, gap=0.0)
    slower = speed.speed_of(planned, [replace(device, packed=(1e8, 1e12))]).decode.reads
    plain = speed.speed_of(planned, [device]).decode.reads
    packed = sum(each.packed[0] for each in planned.parameters if each.packed is not None)
    assert slower - plain == pytest.approx(packed / 1e8 - packed / 1e9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "RTX 4091"], "--device: got 'RTX 4091'"),
        (["--device", "RTX 4091"], ", ".join(GPUS)),
        (["--device", "CPU,H100"], "--device: got cpu with others"),
        (["--device", "24GB:fast:165T:32GB:25"], "--device: got 'fast', expected a number of bytes"),
        (["--device", "24GB:1008GB:165T"], "--device: got '24GB:1008GB:165T', expected memory, bandwidth, FLOPs"),
        (["--device", "24GB:1008GB:165T:32GB:-3"], "link and microseconds of an all-reduce"),
        (["--device", "A100,H100,H100"], "number of ranks: got --tp-size for 2 and --device for 3"),
    ],
)
def test_a_wrong_device_is_told_in_a_line(tmp_path, capsys, arguments, says) -> None:
    LlamaConfig(**WIDTHS, **HEADS).save_pretrained(tmp_path)
    code, out, err = plan(capsys, str(tmp_path), "--tp-size", "2", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert says in err
