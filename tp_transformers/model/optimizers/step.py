"""Steps of optimizers on sharded parameters: each on the tensors that the optimizer expects.

Optimizers read `param`, `param.grad` and their states as in one process. If every element is updated from its own
gradient, they step on this rank's shards, as plain tensors. If an update reads a full matrix (Muon, Adafactor) or all
of them (L-BFGS), they step on full tensors, which are gathered before the step and sharded again after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from inspect import unwrap
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...patches import MissingError, Patch, Undo, replace, replace_all
from ...strategies import SHARD, local_tensor
from ...strategies.parameters.sharded import check_pickled, is_sharded, know, laid_out
from ...strategies.parameters.tensors import HAS_LOCAL
from .scopes import check_optimizer, scope_of
from .stand_ins import TENSORS, Seats, StandIn, gradients, shared_draws

Step = Callable[..., Any]


def _sharded(optimizer: Optimizer) -> bool:
    return any(SHARD.find(param) is not None for group in optimizer.param_groups for param in group["params"])


def _on_stand_ins(step: Step) -> Step:
    """Wrap the `step` of an optimizer's class: it steps on stand-ins if any parameter is a shard."""

    @wraps(step)
    def on_stand_ins(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not _sharded(optimizer):
            return step(optimizer, *args, **kwargs)
        return _step(step, optimizer, *args, **kwargs)

    return on_stand_ins


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step(step: Step, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    scope = scope_of(type(optimizer))
    if scope == "parameter":
        return _one_by_one(step, optimizer, args, kwargs)
    optimizers, needs_full = list(_nested(optimizer)), scope == "model"
    stand_ins = _stand_ins(optimizers, needs_full=needs_full)
    exchange = _Exchange(Seats(optimizers, stand_ins), list(stand_ins.values()), needs_full=needs_full)
    args, kwargs = _with_closure(exchange.around, args, kwargs)
    with exchange, shared_draws(exchange.stand_ins) if needs_full else nullcontext():
        return step(optimizer, *args, **kwargs)


def _one_by_one(step: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Step on one gathered parameter at a time, so that no rank holds two of them.

    Each call starts from the settings that the groups had before the step. Parameters without a gradient are skipped.
    """

    def called(closure: Callable[[], Any]) -> Callable[[], Any]:
        with torch.enable_grad():
            loss = closure()
        return lambda: loss

    args, kwargs = _with_closure(called, args, kwargs)
    stand_ins = _stand_ins([optimizer], needs_full=True)
    seats, groups = Seats([optimizer], stand_ins), list(optimizer.param_groups)
    has = dict(zip(stand_ins, gradients(list(stand_ins.values())), strict=True))
    apart = [param for param, stand_in in stand_ins.items() if stand_in.is_gathered]
    rest = {param for params in seats.params for param in params}.difference(apart)
    settings = {id(group): _settings(group) for group in groups}
    result = None
    try:
        with shared_draws(list(stand_ins.values())):
            for turn in (rest, *({param} for param in apart if has[param])):
                now = [group for group, params in zip(groups, seats.params, strict=True) if turn.intersection(params)]
                for group in now:
                    _reset(group, settings[id(group)])
                optimizer.param_groups[:] = now
                # In the same order on all ranks.
                chosen = [stand_in for param, stand_in in stand_ins.items() if param in turn]
                with _Exchange(seats, chosen, only=turn):
                    result = step(optimizer, *args, **kwargs) if now else result
    finally:
        optimizer.param_groups[:] = groups
    return result


class _Exchange:
    """Replaces parameters of an optimizer by stand-ins; `only` these parameters, if given."""

    def __init__(
        self,
        seats: Seats,
        stand_ins: Sequence[StandIn],
        *,
        needs_full: bool = True,
        only: Collection[Tensor] | None = None,
    ) -> None:
        self.seats, self.stand_ins, self.needs_full, self.only = seats, stand_ins, needs_full, only
        self._is_begun = False

    def __enter__(self) -> None:
        try:
            with torch.no_grad():
                self.seats.fill_states(self.stand_ins)
            self._begin()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        self._end()
        self._leave()

    @torch.no_grad()
    def _begin(self) -> None:
        has = gradients(self.stand_ins) if self.needs_full else [False] * len(self.stand_ins)
        for stand_in, has_gradient in zip(self.stand_ins, has, strict=True):
            stand_in.take(has_gradient)
        self.seats.fill(self.only)
        self._is_begun = True

    @torch.no_grad()
    def _end(self) -> None:
        """Write new values to the parameters, also after a step that raised: as in one process."""
        if self._is_begun:
            self._is_begun = False
            for stand_in in self.stand_ins:
                stand_in.give()

    @torch.no_grad()
    def _leave(self) -> None:
        self.seats.empty()
        for stand_in in self.stand_ins:
            stand_in.clear()
        self.seats.empty_states(self.stand_ins)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap `closure`: while it runs, the optimizer has its own parameters."""

        @wraps(closure)
        def call() -> Any:
            self._end()
            self.seats.empty()
            result = closure()
            self._begin()
            return result

        return call


def _stand_ins(optimizers: Sequence[Optimizer], *, needs_full: bool) -> dict[Tensor, StandIn]:
    """Stand-ins for sharded parameters; a plain shard needs one only if the optimizer needs the full tensor."""
    tensors = TENSORS.find(optimizers[0])
    if tensors is None:
        TENSORS.put(optimizers[0], tensors := {})
    params = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
    return {
        param: StandIn(param, tensors, needs_full=needs_full)
        for param in params
        if (needs_full or type(param) is not nn.Parameter) and (isinstance(param, DTensor) or SHARD.find(param))
    }


def _nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimizer, and those that it wraps, such as that of a Lookahead."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            yield from _nested(value)


def _with_closure(
    change: Callable[[Callable[[], Any]], Callable[[], Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to the closure among the arguments of a step."""
    if args and callable(args[0]):
        return (change(args[0]), *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": change(kwargs["closure"])}
    return args, kwargs


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _reset(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Restore the settings of a group; tensors keep their memory."""
    for key in group.keys() - settings.keys() - {"params"}:
        del group[key]
    for key, value in settings.items():
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _hook_step(original: Callable[..., Any], step: Step) -> Any:
    return original(_on_stand_ins(step))


def _add_param_group(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    original(optimizer, *args, **kwargs)
    if _sharded(optimizer):
        check_optimizer(optimizer)


def _load_state_dict(original: Callable[..., Any], optimizer: Optimizer, state_dict: Any, *args: Any) -> Any:
    """Shard full states, and reject those that another rank has pickled. Collective if parameters are shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    group = next((shard.group for param in params if (shard := SHARD.find(param)) is not None), None)
    if group is not None:
        states, names = (
            dict(state_dict["state"]),
            [name for each in state_dict["param_groups"] for name in each["params"]],
        )
        with group.agree():
            for param, name in zip(params, names, strict=False):  # torch compares their numbers
                if name in states and SHARD.find(param) is not None:
                    states[name] = {
                        key: _loaded(value, param, f"an optimizer, {key} of parameter {name}")
                        for key, value in states[name].items()
                    }
        state_dict = {**state_dict, "state": states}
    return original(optimizer, state_dict, *args)


def _loaded(value: Any, param: Tensor, name: str) -> Any:
    """This rank's shard of a full state; any other state as it is."""
    shard = SHARD.of(param)
    check_pickled(value, param, shard, name)
    is_full = isinstance(value, Tensor) and not isinstance(value, HAS_LOCAL) and value.shape == shard.shape
    if not is_full or value.shape == local_tensor(param).shape:
        return value
    own = shard.own(value).clone()
    return know(own, param) if is_sharded(param) else laid_out(own, param)


def _install() -> Undo:
    """Make the steps of all optimizers go through `_on_stand_ins`, also for classes that already have instances.

    torch has wrapped the step of such a class in a function with its hooks; replace the step that this function calls.
    """
    codes = unwrap(Optimizer.profile_hook_step).__code__.co_consts
    hooked = next((code for code in codes if isinstance(code, CodeType) and "func" in code.co_freevars), None)
    if hooked is None:
        raise MissingError((Optimizer, "profile_hook_step with a function around func"))
    cells: dict[int, tuple[CellType, Step]] = {}
    for kind in _classes(Optimizer):
        step = vars(kind).get("step")
        while step is not None and getattr(step, "__code__", None) is not hooked:
            step = getattr(step, "__wrapped__", None)
        if step is not None:
            cell = step.__closure__[hooked.co_freevars.index("func")]
            cells[id(cell)] = cell, cell.cell_contents
    unhook = replace_all(
        [
            (Optimizer, "profile_hook_step", _hook_step),
            (Optimizer, "add_param_group", _add_param_group),
            (Optimizer, "load_state_dict", _load_state_dict),
        ]
    )
    for cell, step in cells.values():
        cell.cell_contents = _on_stand_ins(step)

    def undo() -> None:
        for cell, step in cells.values():
            cell.cell_contents = step
        unhook()

    return undo


def _classes(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    inner: type[Any]
    for inner in kind.__subclasses__():
        yield from _classes(inner)


def _reject(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Reject shards in `Optimizer.add_param_group`, which every parameter goes through, if steps cannot be patched."""
    original(optimizer, *args, **kwargs)
    if _sharded(optimizer):
        STEPS_ON_SHARDS.refuse()


STEPS_ON_SHARDS = Patch("torch", "optimizers", _install, without=lambda: replace(Optimizer, "add_param_group", _reject))
"""Makes optimizers of torch and of other packages update shards as they update full parameters in one process."""
