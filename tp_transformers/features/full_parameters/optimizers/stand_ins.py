"""Plain tensors that an optimizer steps on in place of parameters: this rank's shards, or full tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....errors import UnsupportedError
from ....marks import Mark
from ....model.dropout import generator_of
from ....ranks import direct
from ....strategies import ParamShard, finish_gradient, local_tensor, shard_of
from ....strategies.shards.tensors import HAS_LOCAL, is_sharded, know, laid_out

TENSORS: Mark[dict[Tensor, nn.Parameter]] = Mark("tp_stand_ins")
"""On an optimizer, the tensor of each stand-in; the same in every step, since the optimizer may key values by it."""


class StandIn:
    """A plain parameter in place of a sharded one; empty between steps."""

    def __init__(self, param: Tensor, tensors: dict[Tensor, nn.Parameter], *, needs_full: bool) -> None:
        """Describe `param`; `needs_full`: the optimizer needs the full tensor, else this rank's shard."""
        self.param, self.shard = param, shard_of(param)
        if needs_full and self.shard is None:
            raise UnsupportedError(
                f"an optimizer's parameter of {tuple(param.shape)}",
                got="a DTensor that no plan has sharded",
                expected="shards of a tensor-parallel model",
                fix="Give it to an optimizer of its own.",
            )
        self.is_gathered = needs_full and self.shard is not None and _needs_gather(self.shard)
        if param not in tensors:
            tensors[param] = nn.Parameter(_empty(param), requires_grad=param.requires_grad)
        self.tensor = tensors[param]
        self._wrapped: dict[int, Tensor] = {}

    def take(self) -> None:
        """Take the values of the parameter and its gradient; of a gathered one, some rank has a gradient."""
        grad = finish_gradient(self.param)
        local, local_grad = local_tensor(self.param), None if grad is None else local_tensor(grad)
        self.tensor.grad = None
        if self.is_gathered:
            assert self.shard is not None
            self.tensor.data = self.shard.full(local)
            self.tensor.grad = self.shard.full(torch.zeros_like(local) if local_grad is None else local_grad)
        else:
            self.tensor.data = local
            self.tensor.grad = local_grad

    def give(self) -> None:
        """Write the new values to the parameter and its gradient; no collective."""
        for target, source in ((self.param, self.tensor), (self.param.grad, self.tensor.grad)):
            if target is not None and source is not None:
                local, own = local_tensor(target), self._own(source.detach())
                if own.data_ptr() != local.data_ptr():
                    local.copy_(own)
        if self.tensor.grad is None:
            self.param.grad = None
        if not self.is_gathered:  # `.data` has a version of its own
            torch.autograd.graph.increment_version(local_tensor(self.param))

    def clear(self) -> None:
        """Release the values."""
        self.tensor.data, self.tensor.grad = _empty(self.param), None

    def enter_state(self, state: dict[str, Any]) -> None:
        """Replace the values of `state` by those for the stand-in, in place."""
        local_shape = None if isinstance(self.param, DTensor) else local_tensor(self.param).shape
        for key, value in state.items():
            # A state dict that was pickled has ordinary tensors for plain shards, and DTensors for DTensors.
            if isinstance(value, HAS_LOCAL) or (isinstance(value, Tensor) and value.shape == local_shape):
                local = value._local_tensor if isinstance(value, HAS_LOCAL) else value
                if isinstance(value, DTensor):
                    self._wrapped[id(local)] = value
                if self.is_gathered:
                    assert self.shard is not None
                    local = self.shard.full(local)
                state[key] = local
            elif isinstance(value, Tensor) and self.shard is not None and self._is_full(value):
                state[key] = self.shard.own(value).clone()  # from a full state dict, or set by user code

    def _is_full(self, value: Tensor) -> bool:
        """True for a full value if the optimizer steps on a shard."""
        return not self.is_gathered and value.shape == self.param.shape != local_tensor(self.param).shape

    def leave_state(self, state: dict[str, Any]) -> Iterator[str]:
        """Reverse `enter_state`; yields the keys of full values that could later be mistaken for shards."""
        shape = self.shard.shape if self.is_gathered and self.shard is not None else local_tensor(self.param).shape
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape and not isinstance(value, DTensor):
                state[key] = self._wrap(self._own(value).clone() if self.is_gathered else value)
            elif isinstance(value, Tensor) and self.is_gathered and value.shape in self._shapes():
                yield key

    def _own(self, value: Tensor) -> Tensor:
        return self.shard.own(value) if self.is_gathered and self.shard is not None else value

    def _wrap(self, local: Tensor) -> Tensor:
        if not isinstance(self.param, DTensor):
            return know(local, self.param)  # type: ignore[no-any-return]
        wrapped: Any = self._wrapped.get(id(local))
        if wrapped is not None and wrapped._local_tensor is local:
            return wrapped  # type: ignore[no-any-return]
        if is_sharded(self.param):
            return know(local, self.param)  # type: ignore[no-any-return]
        return laid_out(local, self.param)

    def _shapes(self) -> Collection[tuple[int, ...]]:
        """Shapes of the plain shards of all ranks."""
        shard = self.shard
        if shard is None or shard.layout is None or isinstance(self.param, DTensor):
            return ()
        return {shard.layout.local_shape(shard.shape, rank) for rank in range(shard.group.size)}


def _needs_gather(shard: ParamShard) -> bool:
    return shard.layout is not None or shard.resharded_over is not None


def _empty(param: Tensor) -> Tensor:
    return torch.empty(0, dtype=param.dtype, device=param.device)


def gradients(stand_ins: Sequence[StandIn]) -> list[bool]:
    """For each parameter, whether any rank has a gradient; one all-reduce per axis that the model is sharded over."""
    has = [stand_in.param.grad is not None for stand_in in stand_ins]
    for group, device in groups_of(stand_ins):
        flags = torch.tensor(has, dtype=torch.uint8, device=device)
        direct.all_reduce(flags, group, direct.MAX)
        has = [bool(flag) for flag in flags.tolist()]
    return has


def groups_of(stand_ins: Iterable[StandIn]) -> list[tuple[dist.ProcessGroup, torch.device]]:
    """The process groups over which any of the parameters is sharded, in the same order on all ranks."""
    devices: dict[Any, torch.device] = {}
    for stand_in in stand_ins:
        if stand_in.shard is not None:
            devices.setdefault(stand_in.shard.group.process_group, stand_in.shard.group.device)
            devices.setdefault(stand_in.shard.resharded_over, stand_in.shard.group.device)
    return [(group, device) for group, device in devices.items() if group is not None]


@contextmanager
def shared_draws(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Draw the first rank's random numbers on all ranks; ranks that had another random state get it back."""
    groups = groups_of(stand_ins)
    devices = {torch.device("cpu"), *(device for _, device in groups)}
    own = {device: generator_of(device).get_state() for device in devices}
    for device, state in own.items():
        shared = state.clone()
        for group, where in groups:
            sent = shared.to(where)
            direct.broadcast(sent, group, 0)
            shared = sent.cpu()
        if torch.equal(shared, state):
            devices.discard(device)
        else:
            generator_of(device).set_state(shared)
    try:
        yield
    finally:
        for device in devices:
            generator_of(device).set_state(own[device])


class Seats:
    """Puts stand-ins into the parameter lists and states of an optimizer for a time."""

    def __init__(self, optimizer: Optimizer, stand_ins: dict[Tensor, StandIn]) -> None:
        self.stand_ins, self.groups, self.states = stand_ins, list(optimizer.param_groups), optimizer.state
        self.params = [list(group["params"]) for group in self.groups]

    def fill(self, only: Collection[Tensor] | None = None) -> None:
        """Put stand-ins into the parameter lists; `only`: these parameters, and no others."""
        for group, params in zip(self.groups, self.params, strict=True):
            chosen = params if only is None else [param for param in params if param in only]
            group["params"][:] = [self._seat(param) for param in chosen]

    def empty(self) -> None:
        """Put the parameters back."""
        for group, params in zip(self.groups, self.params, strict=True):
            group["params"][:] = params

    def fill_states(self, stand_ins: Collection[StandIn]) -> None:
        """Key the states of the optimizer by the tensors of `stand_ins`, and convert their values."""
        _rename(self.states, {stand_in.param: stand_in.tensor for stand_in in stand_ins})
        for stand_in in stand_ins:
            if stand_in.tensor in self.states:
                stand_in.enter_state(self.states[stand_in.tensor])

    def empty_states(self, stand_ins: Collection[StandIn]) -> None:
        """Key the states by the parameters again, and convert their values back.

        Raises UnsupportedError, on all ranks, if a full state has the shape of a shard.
        """
        unclear = [
            (key, stand_in)
            for stand_in in stand_ins
            if stand_in.tensor in self.states
            for key in stand_in.leave_state(self.states[stand_in.tensor])
        ]
        _rename(self.states, {stand_in.tensor: stand_in.param for stand_in in stand_ins})
        for key, stand_in in unclear:
            raise UnsupportedError(
                f"an optimizer's state {key} of a parameter of {tuple(stand_in.param.shape)} on this rank",
                got="a full state of the same shape as a shard",
                expected="another shape",
                fix="Change the rank of the optimizer's projection, or the number of ranks.",
            )

    def _seat(self, param: Tensor) -> Tensor:
        stand_in = self.stand_ins.get(param)
        return param if stand_in is None else stand_in.tensor


def _rename(states: MutableMapping[Any, Any], names: dict[Tensor, Tensor]) -> None:
    """Replace keys of `states`, in place and in order."""
    if any(key in states for key in names):
        items = [(names.get(key, key) if isinstance(key, Tensor) else key, value) for key, value in states.items()]
        states.clear()
        states.update(items)
