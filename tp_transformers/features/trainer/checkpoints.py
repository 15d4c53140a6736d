"""Replacements of the checkpoint methods of transformers' Trainer, for tensor-parallel models."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME, get_last_checkpoint

from ...errors import CheckpointError, UnsupportedError
from ...logs import get_logger
from ...model.dropout import random_states, set_random_states
from ...model.parallelize import is_tensor_parallel
from ...ranks.environment import host_of, node_name
from ...ranks.group import TensorParallelGroup
from ..dcp.load import load_distributed_checkpoint
from ..dcp.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from ..debug.replicas import check_replicas
from ..machines.saves import lacking, sight

logger = get_logger(__name__)

OPTIMIZER_FOLDER = "optimizer"
"""Folder of a checkpoint with the optimizer's state, as a distributed checkpoint."""


def _save_checkpoint(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Synchronise replicated values to those of the first rank, which are saved."""
    differences = check_replicas(self.model, _plain(self.optimizer), synchronize=True)
    if differences and self.model.tp_group.rank == 0:
        worst = max(differences, key=lambda name: differences[name])
        logger.warning(
            "%d tensors that several ranks hold had drifted apart, %s by %.1e; all ranks take the first one's",
            *(len(differences), worst, differences[worst]),
        )
    original(self, model, *args, **kwargs)


def save_model(original: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Save the model from all ranks, and all else from the first."""
    folder = self.args.output_dir if output_dir is None else output_dir
    self.model.save_pretrained(folder)
    if self.args.should_save:
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))


def _save_optimizer_and_scheduler(original: Any, self: Any, output_dir: str) -> None:
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
    groups, rates = optimizer.param_groups, schedule["_last_lr"]
    if len(groups) != len(rates):  # per-group lists come from the current optimizer and scheduler
        current = self.lr_scheduler.state_dict()
        current |= {
            "base_lrs": [group.get("initial_lr") for group in groups],
            "_last_lr": [group["lr"] for group in groups],
        }
        schedule |= {
            name: current.get(name, value)
            for name, value in schedule.items()
            if isinstance(value, list) and len(value) == len(rates)
        }
    else:
        for group, rate in zip(groups, rates, strict=True):
            if not group["params"]:  # the saved state has no settings of it
                group["lr"] = rate
    self.lr_scheduler.load_state_dict(schedule)


def _load_rng_state(original: Any, self: Any, checkpoint: str | None) -> None:
    original(self, checkpoint)
    if checkpoint is not None:  # on another mesh, files of random states differ or are missing
        group = self.model.tp_group
        set_random_states(group.device, group.gather(random_states(group.device))[0])


def train(original: Any, self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Raise on all ranks if one of them lacks the checkpoint to resume from, or would lack the best one at the end:
    transformers leaves out its load on that rank."""
    if getattr(self.args, "save_on_each_node", False):
        raise UnsupportedError(
            "Trainer",
            got="save_on_each_node=True with a tensor-parallel model",
            expected="one save, by the ranks of all machines",
            fix="Leave it out, and let output_dir be a folder that all machines share.",
        )
    if self.args.load_best_model_at_end:
        _check_shared(Path(self.args.output_dir))
    checkpoint = resume_from_checkpoint
    if checkpoint is True:  # each rank takes the last one that it sees
        checkpoint = get_last_checkpoint(self.args.output_dir)
        self.model.tp_group.check_same({"the checkpoint to resume from": checkpoint})
    if checkpoint:
        _check_seen(self.model.tp_group, os.fspath(checkpoint))
    return original(self, resume_from_checkpoint, *args, **kwargs)


def _check_shared(folder: Path) -> None:
    """Raise CheckpointError on all ranks if machines do not share a folder. Collective over all ranks."""
    ranks = gather_object([(node_name(), secrets.token_hex(4))])
    if len({machine for machine, _ in ranks}) == 1:
        return
    mark, makes = folder / f".shared-{ranks[0][1]}", dist.get_rank() == 0
    if makes:
        with suppress(OSError):  # no rank sees it then
            mark.mkdir(parents=True)
    dist.barrier()
    hosts = lacking(gather_object([sight(mark, writes=makes)]))
    if makes:
        with suppress(OSError):
            mark.rmdir()
    if hosts:
        raise CheckpointError(
            str(folder),
            got=f"another folder on {', '.join(hosts)}, with load_best_model_at_end=True",
            expected="one folder, from which all ranks load the best model",
            fix="Let output_dir be a folder that all machines share and rank 0 can write to, or leave out "
            "load_best_model_at_end.",
        )


def _check_seen(group: TensorParallelGroup, checkpoint: str) -> None:
    """Raise CheckpointError on all ranks if one of them lacks what rank 0 sees in a folder. Collective over `tp`."""
    own = set(os.listdir(checkpoint)) if os.path.isdir(checkpoint) else set()
    found = group.gather((node_name(), own))
    needed = {name for name in found[0][1] if not name.startswith("rng_state")}  # each rank has its own
    for machine, seen in found:
        if not seen or not needed <= seen:
            raise CheckpointError(
                checkpoint,
                got=f"no {min(needed - seen, default='such folder')} on {host_of(machine)}",
                expected="a folder that all machines see, with the files of all ranks",
                fix="Let output_dir be a folder that all machines share, or copy the checkpoint to every machine.",
            )


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain


CHANGES = (
    _save_checkpoint,
    save_model,
    _save_optimizer_and_scheduler,
    _load_rng_state,
    train,
)
"""Functions that replace the methods with their names, for models that are loaded with a plan."""
CHANGES_FOR_ALL = (_load_optimizer_and_scheduler,)
"""Functions that do so for all models: one process resumes from the optimizer's state of several ranks."""
