"""Shares, ranks and contexts that fit into given memory, and the capacity of this machine."""

import json
import re
import resource
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from tests.features.quantized.distributed.test_quantized import VARIANTS, packed_folder
from tests.support.commands import main
from tests.support.needs import needs
from tp_transformers import PlanError
from tp_transformers.features.command_line.arguments import shares_of
from tp_transformers.features.planner.dry_load import survey
from tp_transformers.features.planner.fit import fit_shares, fullest, longest_context, more_ranks
from tp_transformers.features.planner.memory import plan_memory
from tp_transformers.features.shares import measures
from tp_transformers.loading.options import check_arguments
from tp_transformers.plans import Plan
from tp_transformers.slices.layout import Ranks

WIDE = LlamaConfig(
    hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=4000, architectures=["LlamaForCausalLM"], dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    WIDE.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("ratios", [(2, 1), (48, 24, 24), (1, 1, 1), (24, 24, 24, 24, 80), (16, 8), (3, 5, 8)], ids=str)
@pytest.mark.parametrize("context", [1, 4096])
def test_ranks_of_unlike_memory_are_filled_alike(wide, ratios, context) -> None:
    memory = [ratio * 10**6 for ratio in ratios]
    found = survey(wide)
    planned = fit_shares(found, memory, context=context)
    filled = [held / room for held, room in zip(planned.total_bytes, memory, strict=True)]
    assert max(filled) < 1.12 * sum(planned.total_bytes) / sum(memory)
    assert fullest(planned, memory) <= fullest(plan_memory(found, len(memory), context=context), memory)
    # The shares that it names lead to the same bytes.
    again = found.with_shares(planned.survey.plan.shares)
    assert plan_memory(again, len(memory), context=context).total_bytes == planned.total_bytes


def test_replicated_bytes_come_off_before_the_shares(tmp_path) -> None:
    """A vocabulary that every rank holds leaves a small rank less of the rest than its memory alone would."""
    WIDE.save_pretrained(tmp_path)
    rules = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    rules["model.layers.*.mlp.down_proj"] = "rowwise"
    found = replace(survey(str(tmp_path)), plan=Plan.from_dict(rules))
    room = plan_memory(found, 1).total_bytes[0]
    planned = fit_shares(found, [room, room // 2])
    shares = planned.survey.plan.shares
    assert shares[0] > 4 * shares[1]
    assert max(planned.total_bytes[0] / room, planned.total_bytes[1] / (room // 2)) < 1


def test_training_counts_gradients_and_states(wide) -> None:
    found = survey(wide)
    alone = plan_memory(found, 2)
    for optimizer, tensors in (("sgd", 1), ("momentum", 2), ("adamw", 3)):
        planned = plan_memory(found, 2, optimizer=optimizer)
        expected = [
            total + tensors * held for total, held in zip(alone.total_bytes, alone.parameter_bytes, strict=True)
        ]
        assert list(planned.total_bytes) == expected


def test_what_would_fit(wide) -> None:
    found, memory = survey(wide), [60 * 10**6, 30 * 10**6]
    planned = fit_shares(found, memory, context=8192)
    assert fullest(planned, memory) > 1
    context = longest_context(planned, memory)

    def with_context(tokens: int) -> float:
        again = found.with_shares(planned.survey.plan.shares)
        return fullest(plan_memory(again, 2, context=tokens), memory)

    assert with_context(context) <= 1 < with_context(context + 1)
    count = more_ranks(planned, memory)
    for ranks, fits in ((count, True), (count - 1, False)):
        room = [*memory, *[min(memory)] * ranks]
        assert (fullest(fit_shares(found, room, context=8192), room) <= 1) is fits
    assert more_ranks(planned, [10**4, 10**4]) is None
    assert longest_context(planned, [10**4, 10**4]) is None


def test_a_context_is_no_longer_than_the_models_own(wide) -> None:
    found = survey(wide)  # of 2048 tokens
    planned = plan_memory(found, 2, context=50_000)
    room = [*plan_memory(found, 2, context=20_000).total_bytes]
    assert longest_context(planned, room) == 2048
    assert longest_context(planned, [*plan_memory(found, 2, context=1000).total_bytes]) == 1000


def test_plan_prints_shares_for_the_memory_of_each_rank(wide, printed, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["plan", wide, "--context", "64", "--memory"]
    out = printed(*arguments, "60MB,30MB,30MB")
    assert "it fits: the fullest rank holds" in out
    assert "load it with tp_shares=[" in out
    assert "the longest context: 2048 tokens, all that the model takes" in out
    header = next(line for line in out.splitlines() if "share" in line and "query/KV heads" in line)
    assert header.split()[-3:] == ["total", "memory", "left"]
    out = printed("plan", wide, "--context", "2048", "--batch", "4", "--memory", "60MB,30MB", code=1)
    assert "it does not fit" in out
    assert "it would fit with --context " in out
    assert "more rank" in out
    said = json.loads(printed(*arguments, "60MB,30MB,30MB", "--json"))
    assert said["memory"] == [60 * 10**6, 30 * 10**6, 30 * 10**6]
    assert said["fits"] is True
    assert len(said["shares"]) == said["tp_size"] == 3
    out = printed("plan", wide, "--shares", "3,1", "--optimizer", "adamw")
    assert "75.0%" in out
    assert "training" in out


def test_no_memory_helps_a_context_that_the_model_does_not_take(wide, printed, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = printed("plan", wide, "--context", "200000", "--memory", "90MB,45MB", code=1).splitlines()
    remedies = [line for line in lines if "would fit" in line]
    assert remedies == ["it would fit with --context 2048, the most that the model takes"]


def test_other_shares_are_named_before_more_ranks(wide, printed) -> None:
    out = printed("plan", wide, "--context", "64", "--memory", "80MB,25MB", "--shares", "1,1", code=1)
    remedy = re.search(r"it would fit with --shares (\S+)", out)
    assert "more rank" not in out
    assert main(["plan", wide, "--context", "64", "--memory", "80MB,25MB", "--shares", remedy[1]]) == 0


def test_shares_that_fit_are_found_where_experts_are_coarse(tmp_path) -> None:
    packed_folder(tmp_path, "qwen3_moe", VARIANTS["int8 by rows"])
    found = survey(str(tmp_path / "plain"))
    total = plan_memory(found, 1).total_bytes[0]
    for first in (50, 60, 75, 80):
        memory = [total * first // 90, total * (100 - first) // 90]
        tried = [fullest(plan_memory(found.with_shares((part, 40 - part)), 2), memory) for part in range(1, 40)]
        assert fullest(fit_shares(found, memory), memory) < 1.02 * min(tried)


@needs("architectures")
def test_a_quantised_model_would_fit_packed(tmp_path, printed) -> None:
    folder, _ = map(str, packed_folder(tmp_path, "gpt_oss", VARIANTS["mxfp4"]))
    dense, packed = (sum(plan_memory(survey(folder, packed=kept), 2).total_bytes) for kept in (False, True))
    room = (dense + packed) // 3
    memory = f"{room},{room // 2}"
    assert "it would fit with --packed" in printed("plan", folder, "--context", "0", "--memory", memory, code=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp-size", "3", "--shares", "2,1"], "got --tp-size for 3 and --shares for 2, expected one number"),
        (["--memory", "2GB,1GB", "--shares", "2,1,1"], "got --shares for 3 and --memory for 2, expected one number"),
        (["--shares", "2,x"], "--shares: got '2,x', expected a positive number for each rank or memory or speed"),
        (["--shares", "memory"], "--shares: got memory, expected numbers, since no rank runs here"),
        (["--tp-size", "2", "--memory", f"{'9' * 400}TB,1GB", "--shares", "x"], "--shares: got 'x'"),
        (["--tp-size", "2", "--optimizer", "lion"], "--optimizer: got 'lion', expected sgd, momentum, adam, adamw"),
    ],
)
def test_contradictions_are_told(wide, printed, arguments, says) -> None:
    assert says in printed("plan", wide, *arguments, code=2)


def test_shares_of_a_command_are_a_number_for_each_rank_or_a_name() -> None:
    assert shares_of(" 2,1.5 ", subject="--shares") == (2, 1.5)
    assert shares_of("speed", subject="--shares") == "speed"
    for text in ("2,x", "0,1", ""):
        with pytest.raises(PlanError, match=r"--shares: got .*, expected a positive number for each rank"):
            shares_of(text, subject="--shares")


@pytest.mark.parametrize("shares", [[], [2, 0], [2, True], "half", [1, float("inf")], [10**400, 1], {"a": 1}])
def test_malformed_shares_are_refused(shares) -> None:
    with pytest.raises(PlanError, match=r"tp_shares: got .*, expected a positive number for each rank, \"memory\" or"):
        check_arguments(None, {"tp_shares": shares}, {})


def test_shares_of_a_plan_need_as_many_ranks() -> None:
    plan = Plan("mine", (), shares=(2, 1, 1))
    assert plan.ranks(3) == Ranks(3, (2, 1, 1))
    with pytest.raises(PlanError, match="tp_shares: got 3 shares, expected 2, one for each of 2 ranks"):
        plan.ranks(2)


def limited(limit: int) -> tuple[int, list[int]]:
    """Run in a process: the free memory without a limit of the process, and with each kind of limit."""
    device, found = torch.device("cpu"), []
    free = measures.free_memory(device)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, before[1]))
        found.append(measures.free_memory(device))
        resource.setrlimit(kind, before)
    return free, found


def test_free_memory_follows_the_limits_of_the_process(pool) -> None:
    limit = 40 * 2**30
    ((free, found),) = pool.run(1, limited, limit)
    for each in found:
        assert 0 < each <= min(free * 1.05, limit)
    assert measures.free_memory(torch.device("cpu"), 2) <= measures.free_memory(torch.device("cpu")) / 1.9


def test_sharers_of_a_processor_share_what_is_available(monkeypatch) -> None:
    monkeypatch.setattr(measures, "available_memory", lambda: 4300)
    assert measures.free_memory(torch.device("cpu")) == 4300
    assert measures.free_memory(torch.device("cpu"), 4) == 1075


def test_products_are_timed() -> None:
    one, many = measures.seconds_of_products(torch.device("cpu"), torch.float32)
    assert 0 < one < many
