"""Optimizer state for torch.distributed.checkpoint, loadable on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from ...errors import CheckpointError, UnsupportedError
from ...ranks.group import GROUP
from ...strategies import local_tensor
from ...strategies.shards.tensors import laid_out
from .local_shard import LocalShard, placed

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of `optimizer` by parameter name, for torch.distributed.checkpoint on any number of ranks.

    As torch's `get_optimizer_state_dict`, flattened, since parameter groups differ with the number of ranks. States of
    plain shards are saved with their position in the full tensor too. `load_optimizer_state_dict` is the inverse.

    Raises UnsupportedError, on all ranks, for a state that is neither tensor nor number (GaLore's projectors,
    bitsandbytes' states), or is quantised in blocks of this rank's elements (torchao's).
    """
    group = GROUP.find(model)
    with nullcontext() if group is None else group.agree():
        _check_values(optimizer)
    _drop_empty(optimizer)  # schedule-free optimizers have them before the first step
    params = _parameters(model)
    with _without_empty_groups(optimizer):
        state: dict[str, Any] = {**get_optimizer_state_dict(model, optimizer, options=_FLAT)}
    for key, value in state.items():
        param = params.get(_name(key))
        if isinstance(value, Tensor) and param is not None:
            state[key] = placed(value, param)
    return state


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of `optimizer_state_dict`, filled in by torch.distributed.checkpoint, into `optimizer`.

    A parameter without a state in it, since it had no gradient before the save, has none afterwards. Raises
    CheckpointError if parameters of one group were saved with different settings.
    """
    params = _parameters(model)
    _check_groups(optimizer, state, {param: name for name, param in reversed(params.items())})  # tied: the first name
    values: dict[str, Any] = {
        key: laid_out(value.plain(), params[_name(key)]) if isinstance(value, LocalShard) else value
        for key, value in state.items()
    }
    with_state = {params[_name(key)] for key in state if key.startswith("state.")}
    for param in [param for param in optimizer.state if param not in with_state]:
        del optimizer.state[param]
    with _without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, values, options=_FLAT)
    _drop_empty(optimizer)


def _drop_empty(optimizer: torch.optim.Optimizer) -> None:
    """Remove empty states, which torch takes for initialized ones."""
    for empty in [param for param, state in optimizer.state.items() if not state]:
        del optimizer.state[empty]


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide groups without parameters: torch fails on them, and a flattened state has no place for their settings."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]


def _check_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any], names: dict[Tensor, str]) -> None:
    """Raise CheckpointError if saved settings differ within a group; torch takes those of the first parameter."""
    for group in optimizer.param_groups:
        for setting in group.keys() - {"params"}:
            saved = {names[param]: state.get(f"param_groups.{names[param]}.{setting}") for param in group["params"]}
            first = next(iter(saved), "")
            other = next((name for name in saved if saved[name] != saved[first]), None)
            if other is not None:
                raise CheckpointError(
                    f"{setting} of a group of the optimizer",
                    got=f"{saved[first]!r} for {first} and {saved[other]!r} for {other} in the checkpoint",
                    expected="one value for all parameters of a group",
                    fix="Make the groups of the optimizer that was saved; set other values after the load.",
                )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that torch gives them in an optimizer's state."""
    return {name.replace("_orig_mod.", ""): param for name, param in model.named_parameters(remove_duplicate=False)}


def _check_values(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            local = local_tensor(value) if isinstance(value, Tensor) else value
            if not (isinstance(local, int | float) or type(local) in (Tensor, nn.Parameter)):
                raise UnsupportedError(
                    f"optimizer_state_dict of {type(optimizer).__name__}",
                    got=f"a state {name} of type {type(local).__name__}",
                    expected="plain tensors and numbers",
                    fix="Save optimizer.state_dict() by torch.save, a file for each rank, for as many ranks.",
                )


def _name(key: str) -> str:
    """Return the parameter's NAME in `state.NAME.exp_avg`, a key of a flattened optimizer state."""
    return key.removeprefix("state.").rpartition(".")[0]
