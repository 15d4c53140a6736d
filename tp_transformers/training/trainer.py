"""transformers' Trainer, for models that are loaded with `tp_plan`.

Not imported by the package itself: transformers' own takes a second to import.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig  # type: ignore[import-untyped]
from accelerate.utils import DistributedType, gather_object, recursively_apply  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from ..checkpoint.reading.distributed import load_distributed_checkpoint
from ..checkpoint.saving.dcp import load_optimizer_state_dict, optimizer_state_dict
from ..errors import CheckpointError, MeshError, UnsupportedError
from ..logs import get_logger
from ..model.clip import clip_grad_norm_
from ..model.optimizer_groups import parameter_groups
from ..model.parallelize import is_tensor_parallel
from ..ranks.random_state import random_state, set_random_state
from ..strategies import batch_sharded
from ..strategies.loss.head import whole_logits
from .replicas import check_replicas

logger = get_logger(__name__)

OPTIMIZER_FOLDER = "optimizer"
"""Folder in a checkpoint of a tensor-parallel model that has the optimizer's state, as a distributed checkpoint."""


class Trainer(transformers.Trainer):
    """transformers' Trainer, with what a tensor-parallel model needs otherwise.

    Gradients are clipped by the norm of the whole model's. Optimizers get groups that do not mix DTensors with plain
    parameters. Values that ranks share and that have drifted apart are brought together at every checkpoint. All ranks
    save the model together. accelerate learns how many ranks share a batch, on CPUs too, where it takes no such number.
    Predictions are gathered from one rank of each copy, with whole logits also under loss parallelism. Everything else
    is transformers'; a model without a plan is trained by it alone.

    With more ranks than the `tp` axis has, the model has to have been through `tp_transformers.data_parallel`.
    Training goes on from a checkpoint on any mesh, and in one process, with this class: the optimizer's state, which
    differs from rank to rank, is a distributed checkpoint in it.

    Raises:
        MeshError: where ranks beyond the `tp` axis would train copies of the model that do not meet.
        CheckpointError: where a checkpoint has the state of an optimizer of one process.
        UnsupportedError: where ranks that share a model have batches of their own.
    """

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        model = self.model
        if not is_tensor_parallel(model) or model.tp_size == 1:
            arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
            return arguments
        copies = dist.get_world_size() // model.tp_size
        if copies > 1 and not hasattr(model, "set_requires_gradient_sync"):
            raise MeshError(
                "Trainer",
                got=f"{copies} copies of a model that is not data-parallel",
                expected="copies whose gradients are averaged",
                fix="Call tp_transformers.data_parallel(model, mesh) first.",
            )
        if any(batch_sharded(model)):
            raise UnsupportedError(
                "Trainer gives the ranks that share a model one batch. Load it without tp_batch_sharded, or train in a "
                "loop of your own."
            )
        parallelism = _Parallelism(tp_size=model.tp_size, dp_shard_size=copies)
        with _distributed_config(model, copies):
            arguments = super()._build_accelerator_args(**kwargs)
        return {**arguments, "parallelism_config": parallelism}

    def create_accelerator_and_postprocess(self) -> None:
        """See `transformers.Trainer`; what is gathered for metrics is of one rank of each copy."""
        super().create_accelerator_and_postprocess()
        if is_tensor_parallel(self.model):
            gather = partial(_gather_for_metrics, self.accelerator, self.model.tp_size)
            self.accelerator.gather_for_metrics = gather
            self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """See `transformers.Trainer`; logits are whole."""
        if prediction_loss_only or not is_tensor_parallel(self.model):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        handle = self.model.register_forward_hook(_with_whole_logits)
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            handle.remove()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """See `transformers.Trainer`, of which older ones scale a loss by the ranks that share it, too."""
        if not is_tensor_parallel(self.model):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        finally:
            self.args.average_tokens_across_devices = averages
        counts_tokens = self.model_accepts_loss_kwargs or self.compute_loss_func
        if averages and counts_tokens and num_items_in_batch is not None:
            loss = loss * (self.args.world_size // self.model.tp_size)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_tensor_parallel(self.model):
            optimizer.param_groups[:] = parameter_groups(optimizer.param_groups)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if not is_tensor_parallel(model):
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and is_tensor_parallel(model):
            self.accelerator.unscale_gradients()
            grad_norm = clip_grad_norm_(model, float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_checkpoint(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """All ranks go on with what the checkpoint has of values that they share: those of the first rank."""
        if is_tensor_parallel(self.model):
            found = check_replicas(self.model, _plain(self.optimizer), synchronize=True)
            if found and self.model.tp_group.rank == 0:
                worst = max(found, key=lambda name: found[name])
                logger.warning(
                    "%d tensors that several ranks hold had drifted apart, %s by %.1e; all ranks take the first one's",
                    *(len(found), worst, found[worst]),
                )
        super()._save_checkpoint(model, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model from all ranks, and what else there is from the first; see `transformers.Trainer`."""
        if not is_tensor_parallel(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_tensor_parallel(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = optimizer_state_dict(self.model, _plain(self.optimizer))
        save(state, checkpoint_id=os.path.join(output_dir, OPTIMIZER_FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
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
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = _plain(self.optimizer)
        state = optimizer_state_dict(self.model, optimizer)
        load_distributed_checkpoint(state, folder)
        load_optimizer_state_dict(self.model, optimizer, state)
        schedule = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        # How many groups there are differs with the mesh: what a scheduler has of each is the optimizer's, or its own.
        groups, own = optimizer.param_groups, self.lr_scheduler.state_dict()
        own |= {
            "base_lrs": [group.get("initial_lr") for group in groups],
            "_last_lr": [group["lr"] for group in groups],
        }
        lists = {name: own.get(name, value) for name, value in schedule.items() if isinstance(value, list)}
        self.lr_scheduler.load_state_dict({**schedule, **lists})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and is_tensor_parallel(self.model):  # another mesh has other files, or none
            group = self.model.tp_group
            own = (random.getstate(), np.random.get_state(), torch.get_rng_state(), random_state(group.device))
            python, numpy, cpu, device = group.gather(own)[0]
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            set_random_state(group.device, device)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain


def _gather_for_metrics(accelerator: Any, tp_size: int, data: Any, use_gather_object: bool = False) -> Any:
    """accelerate's `gather_for_metrics`, from every `tp_size`-th rank: each copy's first."""
    copies = accelerator.num_processes // tp_size
    if use_gather_object:
        data = [item for items in gather_object([data])[::tp_size] for item in items]
    else:
        data = recursively_apply(torch.atleast_1d, data)
        if copies > 1:
            data = recursively_apply(
                lambda tensor: tensor.unflatten(0, (copies, tp_size, -1))[:, 0].flatten(0, 1), accelerator.gather(data)
            )
    state = accelerator.gradient_state
    count = state.remainder if state.end_of_dataloader and state.remainder > 0 else None  # the rest fills up a batch
    return data[:count] if use_gather_object else recursively_apply(lambda tensor: tensor[:count], data)


def _with_whole_logits(model: nn.Module, args: Any, output: Any) -> Any:
    """Join the logits, which follow the loss, of an output."""
    if isinstance(output, tuple):
        return (output[0], whole_logits(model, output[1]), *output[2:])
    if output.get("logits") is not None:
        output["logits"] = whole_logits(model, output["logits"])
    return output


class _Parallelism(ParallelismConfig):
    """accelerate's, which it refuses on CPUs for no reason that concerns a model that is parallel already."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            super()._validate_accelerator(accelerator)


@contextmanager
def _distributed_config(model: PreTrainedModel, copies: int) -> Iterator[None]:
    """For as long as Trainer looks for it there, from transformers 5.18 or so on: how many ranks share a batch."""
    config = model.config
    if getattr(config, "distributed_config", None) is not None:
        yield
        return
    config.distributed_config = SimpleNamespace(dp_size=copies)  # as much of a DistributedConfig as Trainer reads
    try:
        yield
    finally:
        del config.distributed_config
