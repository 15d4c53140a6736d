"""Training that goes on where it was left: on the same ranks, on others, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

import tp_transformers
from tests.distributed.test_training_modes import BATCH, MODES, Mode, start
from tests.pool import Pool

pytestmark = pytest.mark.distributed


def optimizer_of(model: Any) -> Any:
    groups = tp_transformers.parameter_groups(model)
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, betas=(0.8, 0.9))


def train(model: Any, batch: Any, optimizer: Any, schedule: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        tp_transformers.clip_grad_norm_(model, 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def state_of(model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": tp_transformers.optimizer_state_dict(model, optimizer),
    }


def leave(folder: str, name: str, target: str) -> tuple[dict, list[float]]:
    model, batch = start(folder, MODES[name])
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    train(model, batch, optimizer, schedule, 3)
    dcp.save(state_of(model, optimizer, schedule), checkpoint_id=target)
    losses = torch.tensor(train(model, batch, optimizer, schedule, 2))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def resume(folder: str, name: str | None, target: str) -> list[float]:
    if name is None:
        model, batch = AutoModelForCausalLM.from_pretrained(folder).train(), BATCH
    else:
        model, batch = start(folder, MODES[name])
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    state = state_of(model, optimizer, schedule)
    dcp.load(state, checkpoint_id=target, no_dist=not dist.is_initialized())
    model.load_state_dict(state["model"])
    tp_transformers.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    print([g["lr"] for g in optimizer.param_groups])
    schedule = schedule_of(optimizer)
    losses = torch.tensor(train(model, batch, optimizer, schedule, 2))
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return losses.tolist()


@pytest.mark.parametrize("variant", [(8, 4), (9, 3)])
@pytest.mark.parametrize("name", ["replicate", "shard"])
def test_goes_on_elsewhere(pool: Pool, cases: Any, tmp_path: Path, name: str, variant: Any) -> None:
    folder = cases(*variant).folder
    losses = pool.run(4, leave, folder, name, str(tmp_path))
    print(losses)
    for other, size in ((name, 4), ("shard", 4), ("replicate", 4), ("tp", 3), ("sequence and loss", 2), (None, 1)):
        try:
            print(other, size, pool.run(size, resume, folder, other, str(tmp_path)))
        except Exception as e:
            print(other, size, str(e)[-6000:])
