"""Plain tensors that an optimizer steps on in place of parameters: this rank's shards, or full tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
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
from ....strategies import finish_gradient, local_tensor, shard_of
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
        is_part = self.shard is not None and (self.shard.layout is not None or self.shard.resharded_over is not None)
        self.gathered = self.shard if needs_full and is_part else None
        """The shard, if the optimizer steps on the gathered tensor; else None."""
        if param not in tensors:
            tensors[param] = nn.Parameter(_empty(param), requires_grad=param.requires_grad)
        self.tensor = tensors[param]
        self._wrapped: dict[int, Tensor] = {}

    def take(self) -> None:
        """Take the values of the parameter and its gradient; of a gathered one, some rank has a gradient."""
        grad = finish_gradient(self.param)
        local, local_grad = local_tensor(self.param), None if grad is None else local_tensor(grad)
        if self.gathered is not None:
            local_grad = self.gathered.full(torch.zeros_like(local) if local_grad is None else local_grad)
            local = self.gathered.full(local)
        self.tensor.grad = None
        self.tensor.data, self.tensor.grad = local, local_grad

    def give(self) -> None:
        """Write the new values to the parameter and its gradient; no collective."""
        for target, source in ((self.param, self.tensor), (self.param.grad, self.tensor.grad)):
            if target is not None and source is not None:
                local, own = local_tensor(target), self._own(source.detach())
                if own.data_ptr() != local.data_ptr():
                    local.copy_(own)
        if self.tensor.grad is None:
            self.param.grad = None
        if self.gathered is None:  # `.data` has a version of its own
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
                state[key] = local if self.gathered is None else self.gathered.full(local)
            elif isinstance(value, Tensor) and self.shard is not None and self._is_full(value):
                state[key] = self.shard.own(value).clone()  # from a full state dict, or set by user code

    def _is_full(self, value: Tensor) -> bool:
        """True for a full value if the optimizer steps on a shard."""
        return self.gathered is None and value.shape == self.param.shape != local_tensor(self.param).shape

    def leave_state(self, state: dict[str, Any]) -> Iterator[str]:
        """Reverse `enter_state`; yields the keys of full values that could later be mistaken for shards."""
        shape = local_tensor(self.param).shape if self.gathered is None else self.gathered.shape
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape and not isinstance(value, DTensor):
                state[key] = self._wrap(value if self.gathered is None else self._own(value).clone())
            elif isinstance(value, Tensor) and value.shape in self._shapes():
                yield key

    def _own(self, value: Tensor) -> Tensor:
        return value if self.gathered is None else self.gathered.own(value)

    def _wrap(self, local: Tensor) -> Tensor:
        wrapped: Any = self._wrapped.get(id(local))
        if wrapped is not None and wrapped._local_tensor is local:
            return wrapped  # type: ignore[no-any-return]
        return know(local, self.param) if is_sharded(self.param) else laid_out(local, self.param)  # type: ignore[no-any-return]

    def _shapes(self) -> Collection[tuple[int, ...]]:
        """Shapes of the plain shards of all ranks, if the optimizer steps on the full tensor."""
        shard = self.gathered
        if shard is None or shard.layout is None or isinstance(self.param, DTensor):
            return ()
        return {shard.layout.local_shape(shard.shape, rank) for rank in range(shard.group.size)}


def _empty(param: Tensor) -> Tensor:
    return torch.empty(0, dtype=param.dtype, device=param.device)


class Exchange:
    """In its block, stand-ins are in the parameter lists and states of an optimizer.

    After a step that raised, too, the parameters have the new values, as in one process.
    """

    def __init__(
        self, optimizer: Optimizer, stand_ins: Mapping[Tensor, StandIn], only: Collection[Tensor] | None = None
    ) -> None:
        """`stand_ins`: by parameter; `only`: the lists have these parameters, and no others."""
        self.stand_ins, self.states, self.only = stand_ins, optimizer.state, only
        self.tensors: dict[Tensor, Tensor] = {param: stand_in.tensor for param, stand_in in stand_ins.items()}
        self.groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._is_begun = False

    @torch.no_grad()
    def __enter__(self) -> None:
        try:
            self._rename_states(self.tensors)
            for stand_in in self.stand_ins.values():
                if stand_in.tensor in self.states:
                    stand_in.enter_state(self.states[stand_in.tensor])
            self._begin()
        except BaseException:
            self._leave()
            raise

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        self._end()
        self._leave()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap `closure`: while it runs, the optimizer has its own parameters."""

        @wraps(closure)
        def call() -> Any:
            with torch.no_grad():
                self._end()
            result = closure()
            with torch.no_grad():
                self._begin()
            return result

        return call

    def _begin(self) -> None:
        for stand_in in self.stand_ins.values():
            stand_in.take()
        for group, params in self.groups:
            chosen = params if self.only is None else [param for param in params if param in self.only]
            group["params"][:] = [self.tensors.get(param, param) for param in chosen]
        self._is_begun = True

    def _end(self) -> None:
        """Write the new values to the parameters, and put the parameters back into the lists."""
        if self._is_begun:
            self._is_begun = False
            for stand_in in self.stand_ins.values():
                stand_in.give()
        for group, params in self.groups:
            group["params"][:] = params

    def _leave(self) -> None:
        """Release the stand-ins, and give their states to the parameters.

        Raises UnsupportedError, on all ranks, if a full state has the shape of a shard.
        """
        unclear: list[tuple[str, Tensor]] = []
        for param, stand_in in self.stand_ins.items():
            stand_in.clear()
            if stand_in.tensor in self.states:
                unclear += ((key, param) for key in stand_in.leave_state(self.states[stand_in.tensor]))
        self._rename_states({tensor: param for param, tensor in self.tensors.items()})
        for key, param in unclear:
            raise UnsupportedError(
                f"an optimizer's state {key} of a parameter of {tuple(param.shape)} on this rank",
                got="a full state of the same shape as a shard",
                expected="another shape",
                fix="Change the rank of the optimizer's projection, or the number of ranks.",
            )

    def _rename_states(self, names: Mapping[Tensor, Tensor]) -> None:
        """Replace keys of the states, in place and in order."""
        if any(key in self.states for key in names):
            items = list(self.states.items())
            self.states.clear()
            self.states.update((names.get(key, key) if isinstance(key, Tensor) else key, value) for key, value in items)


def gradients(params: Sequence[Tensor]) -> list[bool]:
    """For each parameter, whether any rank has a gradient; one all-reduce per axis that the model is sharded over."""
    has = [param.grad is not None for param in params]
    for group, device in groups_of(params).items():
        flags = torch.tensor(has, dtype=torch.uint8, device=device)
        direct.all_reduce(flags, group, direct.MAX)
        has = [bool(flag) for flag in flags.tolist()]
    return has


def groups_of(params: Iterable[Tensor]) -> dict[dist.ProcessGroup, torch.device]:
    """The process groups over which any parameter is sharded, with their devices, in the same order on all ranks."""
    devices: dict[Any, torch.device] = {}
    for param in params:
        shard = shard_of(param)
        if shard is not None:
            devices |= dict.fromkeys((shard.group.process_group, shard.resharded_over), shard.group.device)
        elif isinstance(param, DTensor):
            devices |= dict.fromkeys(param.device_mesh.get_all_groups(), param.device)
    devices.pop(None, None)
    return devices


@contextmanager
def shared_draws(params: Iterable[Tensor]) -> Iterator[None]:
    """Draw the first rank's random numbers on all ranks; ranks that had another random state get it back."""
    groups = groups_of(params)
    devices = {torch.device("cpu"), *groups.values()}
    own = {device: generator_of(device).get_state() for device in devices}
    for device, state in own.items():
        shared = state.clone()
        for group, where in groups.items():
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
