"""Learning rates of a run that goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tp_transformers
from tp_transformers.features.trainer.checkpoints import _load_optimizer_and_scheduler


def test_a_schedule_of_schedules_goes_on(tmp_path) -> None:
    def make() -> Any:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD([{"params": []}, {"params": [*model.parameters()]}], lr=1.0, momentum=0.9)
        parts: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma) for gamma in (0.5, 0.25)]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
        return SimpleNamespace(model=model, optimizer=optimizer, lr_scheduler=schedule)

    def rates(trainer: Any, steps: int) -> list[list[float]]:
        found = []
        for _ in range(steps):
            trainer.model(torch.ones(3)).sum().backward()
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            found.append([group["lr"] for group in trainer.optimizer.param_groups])
        return found

    trainer = make()
    rates(trainer, 3)
    state = tp_transformers.training.optimizer_state_dict(trainer.model, trainer.optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    torch.save(trainer.lr_scheduler.state_dict(), tmp_path / "scheduler.pt")
    again = make()
    _load_optimizer_and_scheduler(None, again, str(tmp_path))
    assert rates(again, 3) == rates(trainer, 3)
