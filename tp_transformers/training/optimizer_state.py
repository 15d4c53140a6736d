"""Optimizer state for torch.distributed.checkpoint, loadable on any number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ..checkpoint.saving.dcp import LocalShard, placed
from ..errors import UnsupportedError
from ..ranks.group import GROUP
from ..strategies import local_tensor
from ..strategies.parameters.sharded import laid_out

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
    # Schedule-free optimizers have empty states before the first step, which torch takes for initialized ones.
    for empty in [param for param, state in optimizer.state.items() if not state]:
        del optimizer.state[empty]
    params = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Any] = {**get_optimizer_state_dict(model, optimizer, options=_FLAT)}
    for key, value in state.items():
        param = params.get(_name(key))
        if isinstance(value, Tensor) and param is not None:
            state[key] = placed(value, param)
    return state


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of `optimizer_state_dict`, filled in by torch.distributed.checkpoint, into `optimizer`."""
    params = dict(model.named_parameters(remove_duplicate=False))
    values: dict[str, Any] = {
        key: laid_out(value.plain(), params[_name(key)]) if isinstance(value, LocalShard) else value
        for key, value in state.items()
    }
    set_optimizer_state_dict(model, optimizer, values, options=_FLAT)


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
