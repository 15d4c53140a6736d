"""transformers' Trainer, for models that are loaded with `tp_plan`: `from tp_transformers.trainer import Trainer`.

Not imported by the package itself: transformers' own takes a second to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers.trainer import TRAINING_ARGS_NAME

from .errors import MeshError, UnsupportedError, describe
from .gradients import clip_grad_norm_, parameter_groups
from .parallelize import is_tensor_parallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trainer(transformers.Trainer):
    """transformers' Trainer, with what a tensor-parallel model needs otherwise.

    Gradients are clipped by the norm of the whole model's. Optimizers get groups that do not mix DTensors with plain
    parameters. All ranks save the model together. accelerate is told how many ranks share a batch, on CPUs too, where
    it refuses to be told. Everything else is transformers'; a model without a plan is trained as ever.

    With more ranks than the `tp` axis has, the model has to have been through `tp_transformers.data_parallel`.
    Checkpoints hold the model alone (`save_only_model=True`), since an optimizer's state differs from rank to rank.

    Raises:
        MeshError: where ranks beyond the `tp` axis would train copies of the model that do not meet.
        UnsupportedError: where checkpoints would hold the state of the optimizer.
    """

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        model, args = self.model, self.args
        if not is_tensor_parallel(model) or model.tp_size == 1:
            arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
            return arguments
        copies = dist.get_world_size() // model.tp_size
        if copies > 1 and not hasattr(model, "set_requires_gradient_sync"):
            raise MeshError(
                describe(
                    "Trainer",
                    got=f"{copies} copies of a model that is not data-parallel",
                    expected="copies whose gradients are averaged",
                    fix="Call tp_transformers.data_parallel(model, mesh) first.",
                )
            )
        if args.save_strategy != "no" and not args.save_only_model:
            raise UnsupportedError(
                "Trainer cannot save the state of a tensor-parallel model's optimizer, which differs from rank to "
                'rank. Pass save_only_model=True or save_strategy="no".'
            )
        parallelism = _Parallelism(tp_size=model.tp_size, dp_shard_size=copies)
        with _distributed_config(model, copies):
            arguments = super()._build_accelerator_args(**kwargs)
        return {**arguments, "parallelism_config": parallelism}

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
        """See `transformers.Trainer`."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_tensor_parallel(self.model):
            optimizer.param_groups[:] = parameter_groups(optimizer.param_groups)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if not is_tensor_parallel(model):
            return super()._clip_grad_norm(model)
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and is_tensor_parallel(model):
            grad_norm = clip_grad_norm_(model, float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)

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
    config.distributed_config = _Copies(copies)
    try:
        yield
    finally:
        del config.distributed_config


class _Copies:
    """As much of transformers' DistributedConfig as Trainer reads."""

    def __init__(self, dp_size: int) -> None:
        self.dp_size = dp_size
