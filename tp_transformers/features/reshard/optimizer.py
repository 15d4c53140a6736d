"""States of an optimizer: those of a parameter's shape are moved like the parameter, all others are copied."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.reading.jobs import Request
from ...errors import UnsupportedError
from ...slices.stored import Stored
from ...strategies import layout_of, local_tensor, take
from ...strategies.shards.shard import shard_of
from ...strategies.shards.tensors import know, laid_out
from .moves import Moves
from .table import Entry, OldModel

_KEY = "{} of {}"
"""Name of a state in a table."""


@dataclass(frozen=True)
class States:
    """An optimizer without its parameters and the states of their shapes; can be pickled."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
    """The settings of each group, and the names of its parameters."""
    sharded: Mapping[str, Sequence[str]]
    """Parameter -> its states of its own shape."""
    others: Mapping[str, Mapping[str, Any]]
    """Parameter -> its other states: numbers, and tensors without dims."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the states in a table."""
        return frozenset(_KEY.format(key, name) for name, keys in self.sharded.items() for key in keys)

    def restore(self, optimizer: torch.optim.Optimizer | None, model: Any, moves: Moves) -> torch.optim.Optimizer:
        """Give `optimizer`, or a new one, the parameters of the new model and their states. Collective."""
        params = dict(model.named_parameters(remove_duplicate=False))
        groups = [{**settings, "params": [params[name] for name in names]} for settings, names in self.groups]
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for name, others in self.others.items():
            param = params[name]
            states[param] = copy.deepcopy(dict(others))
            for key in self.sharded[name]:
                states[param][key] = self._receive(_KEY.format(key, name), param, moves)
        if optimizer is None:
            optimizer = self.made(groups)
        optimizer.param_groups, optimizer.state = groups, states
        return optimizer

    def made(self, groups: Any) -> torch.optim.Optimizer:
        """A new optimizer of the class, with its defaults."""
        taken = inspect.signature(self.cls.__init__).parameters
        return self.cls(groups, **{name: value for name, value in self.defaults.items() if name in taken})

    @staticmethod
    def _receive(name: str, param: Tensor, moves: Moves) -> Tensor:
        stored, of_param = moves.source.tensors[name], shard_of(param)
        shard = take(stored, layout_of(param), of_param.group.rank if of_param is not None else 0)
        local = torch.empty(tuple(shard.shape), dtype=stored.dtype, device=local_tensor(param).device)
        requests = [Request(step, place) for step, place in shard.read_steps(local) if isinstance(step, Stored)]
        moves.round(requests)
        state: Tensor = know(laid_out(local, param), param)
        return state


class OptimizerStates:
    """The states of an optimizer on one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, held: OldModel) -> None:
        """Add the states to the tensors of `held`.

        Raises UnsupportedError for states that are neither of the shape of a parameter nor single numbers.
        """
        self.optimizer = optimizer
        names = {id(param): name for name, param in held.dense.items()}
        sharded: dict[str, list[str]] = {}
        others: dict[str, dict[str, Any]] = {}
        groups = []
        for group in optimizer.param_groups:
            of_group = []
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise _unsupported("a parameter that is not of the model", "the parameters of the model")
                of_group.append(name)
                if param not in optimizer.state:
                    continue
                sharded[name], others[name] = [], {}
                for key, value in optimizer.state[param].items():
                    if (
                        isinstance(value, Tensor)
                        and value.ndim
                        and local_tensor(value).shape == local_tensor(param).shape
                    ):
                        full = held.table[name]
                        held.table[_KEY.format(key, name)] = Entry(full.shape, value.dtype, full.layout)
                        held.values[_KEY.format(key, name)] = partial(local_tensor, value)
                        sharded[name].append(key)
                    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0):
                        others[name][key] = value.detach().cpu() if isinstance(value, Tensor) else value
                    else:
                        raise _unsupported(f"a state {key} of {name}", "states of its shape, and numbers")
            groups.append(({key: value for key, value in group.items() if key != "params"}, of_group))
        self.states = States(type(optimizer), optimizer.defaults, groups, sharded, others)

    def take(self) -> None:
        """Let go of the optimizer's parameters and states."""
        self.optimizer.state = defaultdict(dict)
        for group in self.optimizer.param_groups:
            group["params"] = []


def _unsupported(got: str, expected: str) -> UnsupportedError:
    fix = (
        "Save the states, and load them on the other ranks; or make a new optimizer after model = reshard(model, ...)."
    )
    return UnsupportedError("reshard of an optimizer", got=got, expected=expected, fix=fix)
