"""Replacements of methods of transformers' Trainer, for models that are loaded with a plan; `original` is for others.

For what each method does, see `transformers.Trainer`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, gather_object, recursively_apply
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...anatomy import check_values, without_values
from ...errors import MeshError, UnsupportedError
from ...model.clip import clip_grad_norm_
from ...model.parallelize import is_tensor_parallel
from ...patches import Undo, replace, replace_all
from ...ranks.collectives import gather_from_region
from ...ranks.group import GROUP
from ...strategies import STRATEGY, batch_sharded, shard_of
from ..full_parameters.optimizers.scopes import check_in_backward
from . import checkpoints


def _build_accelerator_args(original: Any, self: Any, **kwargs: Any) -> Any:
    model = self.model
    if model.tp_size == 1:
        return original(self, **kwargs)
    ranks = dist.get_world_size()
    if self.args.world_size != ranks:
        raise MeshError(
            "Trainer",
            got=f"accelerate's {self.args.world_size} process",
            expected=f"the {ranks} ranks that were started",
            fix="On a CPU, pass use_cpu=True to TrainingArguments, or to the arguments of TRL.",
        )
    sharing = _ranks_with_one_batch(model)
    copies = ranks // sharing
    if copies > 1 and not hasattr(model, "set_requires_gradient_sync"):
        raise MeshError(
            "Trainer",
            got=f"{copies} copies of a model that is not data-parallel",
            expected="copies whose gradients are averaged",
            fix="Call tp_transformers.data_parallel(model, mesh) first.",
        )
    if sharing > 1:
        _check_batches(kwargs["dataloader_config"], copies)
    parallelism = _Parallelism(tp_size=sharing, dp_shard_size=copies)
    with _distributed_config(model, copies):
        arguments = original(self, **kwargs)
    return {**arguments, "parallelism_config": parallelism}


def create_accelerator_and_postprocess(original: Any, self: Any) -> None:
    """Let accelerate not wrap a model with ranks that have their own batches."""
    original(self)
    if _ranks_with_one_batch(self.model) == 1:
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)


def get_tp_size(original: Any, self: Any) -> int:
    return _ranks_with_one_batch(self.model)


def _get_num_items_in_batch(original: Any, self: Any, batch_samples: list[Any], device: Any) -> Any:
    """Trainer divides by the ranks with one batch, also if it has not added them up."""
    if not self.args.average_tokens_across_devices:
        batch_samples = batch_samples * _ranks_with_one_batch(self.model)
    return original(self, batch_samples, device)


def evaluation_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather metrics from one rank of each copy."""
    gather = partial(_gather_for_metrics, self.accelerator, _ranks_with_one_batch(self.model))
    self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
    return original(self, *args, **kwargs)


def prediction_step(
    original: Any, self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
) -> Any:
    """Return unsharded logits."""
    if prediction_loss_only:
        return original(self, model, inputs, prediction_loss_only, ignore_keys)
    handle = self.model.register_forward_hook(_with_full_logits)
    try:
        return original(self, model, inputs, prediction_loss_only, ignore_keys)
    finally:
        handle.remove()


def compute_loss(
    original: Any, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Scale the loss by the copies; older releases scale it by all ranks."""
    averages = self.args.average_tokens_across_devices
    self.args.average_tokens_across_devices = False
    try:
        loss, outputs = original(self, model, inputs, True, num_items_in_batch)
    finally:
        self.args.average_tokens_across_devices = averages
    counts_tokens = self.model_accepts_loss_kwargs or self.compute_loss_func
    if averages and counts_tokens and num_items_in_batch is not None:
        loss = loss * (self.args.world_size // _ranks_with_one_batch(self.model))
    return (loss, outputs) if return_outputs else loss


def create_optimizer(original: Any, self: Any, model: Any = None) -> torch.optim.Optimizer:
    _check_forward(self.model)
    _check_packed(self.model)
    check_in_backward(str(getattr(self.args.optim, "value", self.args.optim)))
    trainer = sys.modules[transformers.Trainer.__module__]
    with ExitStack() as stack:  # keep the groups of one process: releases from about 5.20 split them by mesh
        if hasattr(trainer, "has_mixed_dtensor"):
            stack.callback(replace(trainer, "has_mixed_dtensor", lambda original, tensors: False))
        return original(self, model)  # type: ignore[no-any-return]


def _clip_grad_norm(original: Any, self: Any, model: Any) -> Any:
    self.accelerator.unscale_gradients()
    return clip_grad_norm_(model, self.args.max_grad_norm)


def _get_grad_norm(original: Any, self: Any, model: Any, grad_norm: Any = None) -> Any:
    if grad_norm is None:
        self.accelerator.unscale_gradients()
        grad_norm = clip_grad_norm_(model, float("inf"))
    return original(self, model, grad_norm=grad_norm)


def _check_packed(model: nn.Module) -> None:
    """Raise UnsupportedError for packed weights without adapters, unless the caller has frozen other parameters too."""
    packed = set(without_values(model))
    if packed and not hasattr(model, "peft_config"):
        rest = [param for name, param in model.named_parameters() if name not in packed and param.is_floating_point()]
        if all(param.requires_grad for param in rest):
            check_values(model, "Trainer without adapters", "{}, which it would leave as they are")


_CHANGES = (
    _build_accelerator_args,
    create_accelerator_and_postprocess,
    get_tp_size,
    _get_num_items_in_batch,
    evaluation_loop,
    prediction_step,
    compute_loss,
    create_optimizer,
    _clip_grad_norm,
    _get_grad_norm,
    *checkpoints.CHANGES,
)
"""Functions that replace the methods with their names."""


def change_methods() -> Undo:
    """Replace methods of `transformers.Trainer`; return a function that restores them."""
    changes = {change.__name__: _with_plan(change) for change in _CHANGES}
    changes |= {name: _with_plan(_inside(context)) for name, context in _CONTEXTS.items()}
    changes |= {change.__name__: change for change in checkpoints.CHANGES_FOR_ALL}
    return replace_all((transformers.Trainer, name, change) for name, change in changes.items())


def _with_plan(change: Callable[..., Any]) -> Callable[..., Any]:
    """Make `change` for models that are loaded with a plan."""

    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tensor_parallel(self.model):
            return change(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


def _inside(context: Callable[[Any], AbstractContextManager[None]]) -> Callable[..., Any]:
    """Call the method in `context` of the trainer."""

    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return original(self, *args, **kwargs)

    return method


def _ranks_with_one_batch(model: Any) -> int:
    """Number of consecutive ranks to which Trainer gives the same batch."""
    return 1 if any(batch_sharded(model)) else model.tp_size  # type: ignore[no-any-return]


def _check_batches(config: Any, copies: int) -> None:
    """Let every rank read its batches where accelerate would slice those of rank 0 over ranks, not over copies."""
    if config.dispatch_batches:
        raise UnsupportedError(
            "accelerator_config of TrainingArguments",
            got="dispatch_batches=True with a tensor-parallel model",
            expected="batches that each rank reads",
            fix="Leave it out: accelerate would divide the length of an epoch by the ranks.",
        )
    if copies > 1 or config.split_batches:
        config.dispatch_batches = False


class _Copies:
    """accelerate's state of this process, with the copies of a model in place of ranks."""

    def __init__(self, state: Any, ranks: int) -> None:
        self._state = state
        self.num_processes = state.num_processes // ranks
        self.process_index = state.process_index // ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_state"), name)  # it has none yet while it is copied


@contextmanager
def _copies_for_ranks(trainer: Any) -> Iterator[None]:
    """Context in which `args.world_size` is the number of copies, and `args.process_index` the index of this one: ranks
    of one copy take the same batches, and seed their workers alike."""
    args, state = trainer.args, trainer.args.distributed_state
    if state is not None:
        args.distributed_state = _Copies(state, _ranks_with_one_batch(trainer.model))
    try:
        yield
    finally:
        args.distributed_state = state


@contextmanager
def _steps_of_copies(trainer: Any) -> Iterator[None]:
    """Context in which Trainer divides the samples of an evaluation by the batch of all copies, not of all ranks."""

    def metrics(original: Any, *args: Any, num_samples: Any = None, num_steps: Any = None, **kwargs: Any) -> Any:
        if num_steps is not None:
            copies = trainer.args.world_size // _ranks_with_one_batch(trainer.model)
            num_steps = math.ceil(num_samples / (trainer.args.eval_batch_size * copies))
        return original(*args, num_samples=num_samples, num_steps=num_steps, **kwargs)

    undo = replace(sys.modules[transformers.Trainer.__module__], "speed_metrics", metrics)
    try:
        yield
    finally:
        undo()


@contextmanager
def _counted_once(trainer: Any, name: str) -> Iterator[None]:
    """Context after which a number of `trainer.state`, to which every rank has added, has it from each copy once."""
    before = getattr(trainer.state, name)
    yield
    added = getattr(trainer.state, name) - before
    setattr(trainer.state, name, before + added // _ranks_with_one_batch(trainer.model))


_CONTEXTS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "_get_dataloader": _copies_for_ranks,
    "_track_num_input_tokens": partial(_counted_once, name="num_input_tokens_seen"),
    "store_flos": partial(_counted_once, name="total_flos"),
    "evaluate": _steps_of_copies,
    "predict": _steps_of_copies,
}
"""Name of a method -> the context in which the method is called."""


def _check_forward(model: Any) -> None:
    """Raise UnsupportedError if another library's forward, such as TRL's, may use this rank's rows of the output
    embedding as the full weight: it gathers DTensors only."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, forward = base.get_output_embeddings(), vars(base).get("forward")
    module = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
    shard = shard_of(getattr(head, "weight", None))
    is_known = module.startswith(("accelerate.", __name__.partition(".")[0]))  # they call the class's forward
    if forward is None or is_known or shard is None or shard.layout is None:
        return
    if shard.placement is None:
        raise UnsupportedError(
            "Trainer",
            got=f"a forward of {module or 'another library'}, which multiplies by the weight of the output embedding",
            expected=f"{shard.shape[0]} rows that divide by {shard.group.size} ranks",
            fix='Take as many ranks as divide them, or a plan that says "replicate" for the output embedding.',
        )


def _gather_for_metrics(accelerator: Any, tp_size: int, data: Any, use_gather_object: bool = False) -> Any:
    """accelerate's `gather_for_metrics` from the first rank of each copy."""
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
    count = (
        state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    )  # without samples that pad the last batch
    return data[:count] if use_gather_object else recursively_apply(lambda tensor: tensor[:count], data)


def _with_full_logits(model: nn.Module, args: Any, output: Any) -> Any:
    """Gather the logits of an output; in a tuple they follow the loss."""
    if isinstance(output, tuple):
        return (output[0], _full(model, output[1]), *output[2:])
    if output.get("logits") is not None:
        output["logits"] = _full(model, output["logits"])
    return output


def _full(model: nn.Module, logits: Tensor) -> Tensor:
    """Gather logits that the output embedding, or the adapter around it, has left sharded (backward: own slice)."""
    strategies = [STRATEGY.find(module) for module in model.get_output_embeddings().modules()]  # type: ignore[operator]
    heads: list[Any] = [strategy for strategy in strategies if hasattr(strategy, "keeps_shard")]
    for head in heads[:1]:
        group = GROUP.of(model)
        if group.process_group is not None and logits.shape[-1] != head.output_split.length:
            return gather_from_region(logits, head.output_split.widths, group.process_group)
    return logits


class _Parallelism(ParallelismConfig):
    """accelerate's ParallelismConfig without its check that rejects CPUs, since the model is parallel already."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            super()._validate_accelerator(accelerator)


@contextmanager
def _distributed_config(model: PreTrainedModel, copies: int) -> Iterator[None]:
    """Context with `config.distributed_config`, where Trainer reads the number of copies (from about 5.18)."""
    config = model.config
    if getattr(config, "distributed_config", None) is not None:
        yield
        return
    config.distributed_config = SimpleNamespace(dp_size=copies)  # the only field that Trainer reads
    try:
        yield
    finally:
        del config.distributed_config
