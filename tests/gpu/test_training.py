"""Training on GPUs against one process there: sequence and loss parallelism, copies, FSDP2, fp16 by a scaler."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp_transformers
from tests.support.comparisons import full_parameters, largest_step, relative_errors, worst
from tests.support.devices import DEVICE, load_here, one_process, start
from tests.support.tiers import wide
from tests.support.training import BATCH, LOSS_TOLERANCE, MAX_NORM, NORM_TOLERANCE, WEIGHT_TOLERANCE

STEPS = 3
BOTH = {"tp_sequence_parallel": True, "tp_loss_parallel": True}
MODES: dict[str, tuple[int, str | None, dict[str, Any]]] = {
    "tp": (1, None, {}),
    "shard": (2, "shard", {}),
    "sequence and loss": (1, None, BOTH),
    "replicate": (2, "replicate", {}),
    "batch-sharded": (1, "replicate", {"tp_batch_sharded": True}),
    "shard, sequence and loss": (2, "shard", BOTH),
}
"""Copies of the model, the mode of `data_parallel`, options of `from_pretrained`."""
# bf16 has 8 bits, fp16 11; a sum over ranks is rounded once more.
SHORT_TOLERANCE = 0.03

Clip = Callable[[Any, float], Tensor]


def steps(model: Any, batch: Tensor, clip: Clip, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Losses and gradient norms of steps of AdamW, under autocast if `dtype` is given; fp16 with a scaler."""
    model.train()
    optimizer = torch.optim.AdamW(tp_transformers.training.parameter_groups(model), lr=1e-2, eps=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=dtype == torch.float16)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            loss = model(batch, labels=batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip(model, MAX_NORM).detach())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def clip_one(model: nn.Module, limit: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def train(folder: str, name: str, dtype: torch.dtype | None = None) -> dict[str, float]:
    """Run on every rank: largest relative differences from one process that trains on the batches of all copies."""
    copies, mode, options = MODES[name]
    plain = one_process(folder)
    expected = steps(plain, BATCH.to(DEVICE), clip_one, dtype)
    size = int(os.environ["WORLD_SIZE"])
    mesh = start(copies, size // copies, names=("dp", "tp"))
    model = load_here(folder, mesh=mesh, **options)
    if mode is not None:
        tp_transformers.data_parallel(model, mesh, mode=mode)
    parts = size if options.get("tp_batch_sharded") else copies
    batch = BATCH.chunk(parts)[dist.get_rank() * parts // size].to(DEVICE)
    seen = steps(model, batch, tp_transformers.clip_grad_norm_, dtype)
    losses = seen["losses"].cpu()
    dist.all_reduce(losses)  # the copies have parts of equal length
    return {
        "losses": largest_step(losses / size, expected["losses"].cpu()),
        "norms": largest_step(seen["norms"].cpu(), expected["norms"].cpu()),
        "weights": worst(relative_errors(full_parameters(model), full_parameters(plain)))[1],
    }


@pytest.mark.parametrize("name", wide(MODES, 2))
def test_steps_are_those_of_one_process(pool, cases, name) -> None:
    for found in pool.run(2 * MODES[name][0], train, cases(9, 3).folder, name):
        print(found)
        assert found["losses"] < LOSS_TOLERANCE
        assert found["norms"] < NORM_TOLERANCE
        assert found["weights"] < WEIGHT_TOLERANCE


@pytest.mark.parametrize("dtype", wide([torch.float16, torch.bfloat16], 1))
def test_steps_in_short_floats(pool, cases, dtype) -> None:
    for found in pool.run(2, train, cases(9, 3).folder, "tp", dtype):
        print(found)
        assert found["losses"] < SHORT_TOLERANCE
        assert found["norms"] < SHORT_TOLERANCE
