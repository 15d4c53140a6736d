"""Replacements of the checkpoint methods of transformers' Trainer, for tensor-parallel models."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from ..checkpoint.reading.distributed import load_distributed_checkpoint
from ..errors import CheckpointError
from ..logs import get_logger
from ..model.parallelize import is_tensor_parallel
from ..ranks.random_state import random_states, set_random_states
from .optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from .replicas import check_replicas

logger = get_logger(__name__)

OPTIMIZER_FOLDER = "optimizer"
"""Folder of a checkpoint with the optimizer's state, as a distributed checkpoint."""


def _save_checkpoint(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Synchronise replicated values to those of the first rank, which are saved."""
    if is_tensor_parallel(self.model):
        differences = check_replicas(self.model, _plain(self.optimizer), synchronize=True)
        if differences and self.model.tp_group.rank == 0:
            worst = max(differences, key=lambda name: differences[name])
            logger.warning(
                "%d tensors that several ranks hold had drifted apart, %s by %.1e; all ranks take the first one's",
                *(len(differences), worst, differences[worst]),
            )
    original(self, model, *args, **kwargs)


def save_model(original: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Save the model from all ranks, and all else from the first. See `transformers.Trainer`."""
    if not is_tensor_parallel(self.model):
        original(self, output_dir, _internal_call)
        return
    folder = self.args.output_dir if output_dir is None else output_dir
    self.model.save_pretrained(folder)
    if self.args.should_save:
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))


def _save_optimizer_and_scheduler(original: Any, self: Any, output_dir: str) -> None:
    if not is_tensor_parallel(self.model):
        original(self, output_dir)
        return
    state = optimizer_state_dict(self.model, _plain(self.optimizer))
    save(state, checkpoint_id=os.path.join(output_dir, OPTIMIZER_FOLDER))
    if self.args.should_save:
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))


def _load_optimizer_and_scheduler(original: Any, self: Any, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    folder, file = (os.path.join(checkpoint, name) for name in (OPTIMIZER_FOLDER, OPTIMIZER_NAME))
    if not os.path.isdir(folder):
        if is_tensor_parallel(self.model) and os.path.isfile(file):
            raise CheckpointError(
                checkpoint,
                got=f"{OPTIMIZER_NAME}, the state of an optimizer of one process",
                expected=f"the folder {OPTIMIZER_FOLDER}, which this Trainer writes of a tensor-parallel model",
                fix=f"Go on in one process, or remove {OPTIMIZER_NAME} to begin with a new optimizer.",
            )
        original(self, checkpoint)
        return
    optimizer = _plain(self.optimizer)
    state = optimizer_state_dict(self.model, optimizer)
    load_distributed_checkpoint(state, folder)
    load_optimizer_state_dict(self.model, optimizer, state)
    schedule = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
    # The number of groups differs with the mesh: per-group lists come from the current optimizer and scheduler.
    groups, current = optimizer.param_groups, self.lr_scheduler.state_dict()
    current |= {
        "base_lrs": [group.get("initial_lr") for group in groups],
        "_last_lr": [group["lr"] for group in groups],
    }
    lists = {name: current.get(name, value) for name, value in schedule.items() if isinstance(value, list)}
    self.lr_scheduler.load_state_dict({**schedule, **lists})


def _load_rng_state(original: Any, self: Any, checkpoint: str | None) -> None:
    original(self, checkpoint)
    if checkpoint is not None and is_tensor_parallel(
        self.model
    ):  # on another mesh, files of random states differ or are missing
        group = self.model.tp_group
        set_random_states(group.device, group.gather(random_states(group.device))[0])


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain


CHANGES = (
    _save_checkpoint,
    save_model,
    _save_optimizer_and_scheduler,
    _load_optimizer_and_scheduler,
    _load_rng_state,
)
"""Functions that replace the methods with their names."""
