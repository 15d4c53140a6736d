"""Parameters that are held in another form than a tensor once their values have been read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.support.models import PROMPTS
from tp_transformers.loading import memory
from tp_transformers.loading.load import place


class Doubled(memory.Holding):
    """Holds weights of MLPs twice as large; a module computes with half of what is held."""

    def __init__(self, names: list[str]) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.arriving = names
        self.rounds: list[int] = []

    @classmethod
    def find(cls, model: Any, targets: Any, shards: Any, device: Any, request: Any) -> Doubled:
        return cls([name for name in shards if "mlp" in name])

    def put(self, name: str, value: torch.Tensor) -> None:
        value.product = "doubled"  # type: ignore[attr-defined]
        self.weights[name] = value.mul_(2)

    def hold(self, model: Any) -> None:
        assert self.weights.keys() == set(self.arriving)
        for name, weight in self.weights.items():
            place(model, name, weight / 2)


@pytest.mark.parametrize("size", [1, 1 << 30])
def test_weights_arrive_round_by_round(cases, size, monkeypatch) -> None:
    rounds = []
    fill = memory.Memory._fill_round

    def fill_round(self: Any, names: Any, *args: Any) -> None:
        rounds.append(list(names))
        fill(self, names, *args)

    monkeypatch.setattr(memory, "added", lambda kind: [Doubled])
    monkeypatch.setattr(memory, "ROUND_BYTES", size)
    monkeypatch.setattr(memory.Memory, "_fill_round", fill_round)
    whole = AutoModelForCausalLM.from_pretrained(cases(9, 3).folder)
    with tp_transformers.enable():
        model = AutoModelForCausalLM.from_pretrained(cases(9, 3).folder, tp_plan="auto", tp_size=1)
    arrived = [name for names in rounds[1:] for name in names]
    assert sorted(arrived) == [name for name in sorted(dict(whole.named_parameters())) if "mlp" in name]
    assert len(rounds) == 1 + (len(arrived) if size == 1 else 1)
    assert model.tp_report.products == {"doubled": len(arrived)}
    assert torch.equal(model(PROMPTS).logits, whole(PROMPTS).logits)
