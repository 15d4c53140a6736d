"""Patch of accelerate: its saves are those of the full model and optimizer, its schedules count copies, not ranks."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...anatomy import check_values
from ...checkpoint.saving.save import gather
from ...marks import untyped
from ...patches import Patch, Undo, nothing, replace_all
from ...ranks.group import TensorParallelGroup
from ...strategies import SHARD, local_tensor

_MODULE = "accelerate.accelerator"


def get_state_dict(original: Any, self: Any, model: nn.Module, unwrap: bool = True) -> Any:
    """See `accelerate.Accelerator`; full tensors on the CPU of rank 0, an empty dict on other ranks. Collective."""
    group = _group(model.parameters())
    if group is None:
        return original(self, model, unwrap)
    if unwrap:
        model = self.unwrap_model(model)
    if not hasattr(model, "peft_config"):  # packed weights stay meta tensors beside an adapter
        check_values(model, "Accelerator.get_state_dict")
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {id(value): value for value in state.values()}  # tied parameters stay tied
    full = {
        key: gather(value, group) if isinstance(value, Tensor) and not value.is_meta else value
        for key, value in tensors.items()
    }
    return OrderedDict((name, full[id(value)]) for name, value in state.items() if group.writes)


def save_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """See `accelerate.Accelerator`; optimizers have their full states, which any number of ranks loads. Collective."""
    with ExitStack() as stack:
        for optimizer in self._optimizers:
            if _group(_params([optimizer])) is not None:
                stack.enter_context(_full_states(optimizer))
        return original(self, *args, **kwargs)


@contextmanager
def _full_states(optimizer: Any) -> Iterator[None]:
    """Context in which `state_dict` of accelerate's wrapper of an optimizer gathers full states on rank 0."""
    optimizer.state_dict = partial(_full_state, optimizer.optimizer)
    try:
        yield
    finally:
        del optimizer.state_dict


def _full_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with full tensors on the CPU of rank 0; None in place of them on other ranks."""

    def full(param: Tensor, value: Any) -> Any:
        shard = SHARD.find(param)
        is_sharded = shard is not None and isinstance(value, Tensor) and value.shape == param.shape
        return shard.gather(local_tensor(value)) if shard is not None and is_sharded else value

    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = [name for group in state["param_groups"] for name in group["params"]]
    values = {
        name: {key: full(param, value) for key, value in state["state"][name].items()}
        for name, param in zip(names, params, strict=True)
        if name in state["state"]
    }
    return {**state, "state": values}


def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """See `accelerate.scheduler.AcceleratedScheduler`, which steps once a rank; here it steps once a copy."""
    group = _group(_params(self.optimizers))
    if group is None or self.split_batches:
        original(self, *args, **kwargs)
        return
    schedule, state = self.scheduler, untyped(sys.modules["accelerate.state"]).AcceleratorState()
    self.split_batches = True  # one step a call
    try:
        original(self, *args, **kwargs)
        if self.step_with_optimizer and self.gradient_state.sync_gradients:
            for _ in range(state.num_processes // group.size - 1):
                if getattr(schedule, "total_steps", math.inf) >= getattr(schedule, "_step_count", 0):
                    original(self, *args, **kwargs)
    finally:
        self.split_batches = False


def _params(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    return (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])


def _group(params: Iterable[Tensor]) -> TensorParallelGroup | None:
    """The ranks that share the parameters; None if no other rank has a shard of them."""
    shards = (shard for param in params if (shard := SHARD.find(param)) is not None and shard.group.size > 1)
    return next((shard.group for shard in shards), None)


def _install() -> Undo:
    accelerate = untyped(sys.modules[_MODULE])
    saves = [(accelerate.Accelerator, change.__name__, change) for change in (get_state_dict, save_state)]
    return replace_all([*saves, (accelerate.AcceleratedScheduler, "step", step)])


ACCELERATOR = Patch("accelerate", "Accelerator.save_state", _install, module=_MODULE, without=nothing)
"""Held by every model that is loaded with a plan."""
