"""A forgotten `enable()`, torchrun or `tp_plan` is told in one line, once; a plan of ours is known by its name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.models import PROMPTS
from tp_transformers.loading import forgotten, from_pretrained
from tp_transformers.loading.choose_plan import ModelPlan, read_plan
from tp_transformers.logs import warn_once
from tp_transformers.plans.yaml_file import available_plans

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The warnings of `forgotten`, in a process that has told nothing yet."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(forgotten, "CALLED", set())
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, forgotten.logger.name):
        yield lambda: [each.getMessage() for each in caplog.records if each.name == forgotten.logger.name]
    warn_once.cache_clear()


def test_a_plan_in_one_process_is_told_once(cases, lines) -> None:
    folder = cases(9, 3).folder
    with tp_transformers.enable():
        AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", tp_size=1)
        assert not lines()
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    assert len(lines()) == 1
    assert "torchrun --nproc-per-node N" in lines()[0]


def test_a_size_without_a_plan_is_told_once(cases, lines, monkeypatch) -> None:
    seen = []

    def original(cls: type, *args: Any, **kwargs: Any) -> str:
        """In place of transformers', which starts a process group."""
        seen.append(kwargs)
        return "transformers' own"

    for _ in range(2):
        found = from_pretrained.from_pretrained(original, AutoModelForCausalLM, "x", tp_size=2)
        assert found == "transformers' own"
    assert seen == [{"tp_size": 2}] * 2  # its meaning stays
    assert len(lines()) == 1
    assert "tp_size=2 without tp_plan" in lines()[0]
    assert 'tp_plan="auto"' in lines()[0]


@pytest.mark.parametrize(
    ("started", "sizes", "said"),
    [
        ({"script"}, {}, 1),
        ({"script"}, {"RANK": "1"}, 0),
        ({"script"}, {"WORLD_SIZE": "1"}, 0),
        (set(), {}, 0),
    ],
)
def test_full_copies_on_ranks_of_the_command_are_told_once(cases, lines, monkeypatch, started, sizes, said) -> None:
    for name, value in {**LAUNCHED, **sizes}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(forgotten, "CALLED", started)
    with tp_transformers.enable():
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(cases(9, 3).folder)
    assert len(lines()) == said
    assert all('each of 2 ranks loads the full model: pass tp_plan="auto"' in line for line in lines())


@pytest.mark.parametrize("called", [set(), {"enable"}, {"disable"}])
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_transformers_cut_is_told_at_the_end(cases, lines, monkeypatch, called, size) -> None:
    model = AutoModelForCausalLM.from_pretrained(cases(9, 3).folder)
    model._tp_size = size
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(forgotten, "CALLED", called)
    forgotten.warn_of_no_hook()
    assert len(lines()) == (size > 1 and not called)
    assert all("tp_transformers.enable() before from_pretrained" in line for line in lines())


@pytest.mark.parametrize("name", ["llama", "lama"])
def test_a_plan_is_known_by_its_name(cases, name) -> None:
    if name == "lama":
        with pytest.raises(tp_transformers.PlanError, match="nearest: llama"):
            read_plan(name)
        return
    assert all(isinstance(read_plan(each), ModelPlan) for each in available_plans())
    with tp_transformers.enable():
        found, auto = (
            AutoModelForCausalLM.from_pretrained(cases(9, 3).folder, tp_plan=plan) for plan in (name, "auto")
        )
    assert found.tp_plan == auto.tp_plan
    assert torch.equal(found(PROMPTS).logits, auto(PROMPTS).logits)
