"""Steps of optimizers on sharded parameters: each on the tensors that the optimizer expects.

Optimizers read `param`, `param.grad` and their states as in one process. If every element is updated from its own
gradient, they step on this rank's shards, as plain tensors. If an update reads a full matrix (Muon, Adafactor), they
step on one full tensor after the other, which is gathered before the step and sharded again after it. All others are
for `full_parameters`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ....errors import UnsupportedError
from ....patches import Patch, Undo, replace, replace_all
from ....strategies import SHARD
from ....strategies.shards.tensors import HAS_LOCAL, is_sharded, know, laid_out
from ..full_parameters import FULL, IS_OPEN
from ..values import check_pickled, own_shard
from .scopes import check_optimizer, scope_of
from .stand_ins import TENSORS, Exchange, StandIn, gradients, shared_draws

Step = Callable[..., Any]


def _params(optimizer: Optimizer) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _sharded(optimizer: Optimizer) -> bool:
    return any(SHARD.find(param) is not None for param in _params(optimizer))


def _on_stand_ins(step: Step) -> Step:
    """Wrap the `step` of an optimizer's class: it steps on stand-ins if any parameter is a shard."""

    @wraps(step)
    def on_stand_ins(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _check_block(optimizer)
        if not _sharded(optimizer):
            return step(optimizer, *args, **kwargs)
        return _step(step, optimizer, *args, **kwargs)

    on_stand_ins.tp_steps = True  # type: ignore[attr-defined]
    return on_stand_ins


def _check_block(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if an optimizer was made inside of `full_parameters` and steps outside, or reversely."""
    params = list(_params(optimizer))
    is_outside = any(IS_OPEN.find(param) is False for param in params)
    if is_outside or any(IS_OPEN.find(FULL.find(param)) for param in params):
        places = ("inside", "outside") if is_outside else ("outside", "inside")
        raise UnsupportedError(
            f"a step of {type(optimizer).__name__} {places[1]} of full_parameters",
            got=f"parameters of an optimizer that was made {places[0]}",
            expected=f"a step {places[0]}",
            fix=f"Call step {places[0]} of `with tp_transformers.training.full_parameters(model):`, or make it "
            f"{places[1]}.",
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step(step: Step, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    if scope_of(type(optimizer)) == "parameter":
        return _one_by_one(step, optimizer, args, kwargs)
    exchange = Exchange(optimizer, _stand_ins(optimizer, needs_full=False))
    args, kwargs = _with_closure(exchange.around, args, kwargs)
    with exchange:
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
    stand_ins, groups = _stand_ins(optimizer, needs_full=True), list(optimizer.param_groups)
    has = dict(zip(stand_ins, gradients(list(stand_ins)), strict=True))
    apart = [param for param, stand_in in stand_ins.items() if stand_in.gathered is not None]
    rest = set(_params(optimizer)).difference(apart)
    settings = {id(group): _settings(group) for group in groups}
    result = None
    try:
        with shared_draws(stand_ins):
            for turn in (rest, *({param} for param in apart if has[param])):
                now = [group for group in groups if turn.intersection(group["params"])]
                for group in now:
                    _reset(group, settings[id(group)])
                optimizer.param_groups[:] = now
                # In the same order on all ranks.
                chosen = {param: stand_in for param, stand_in in stand_ins.items() if param in turn}
                with Exchange(optimizer, chosen, only=turn):
                    result = step(optimizer, *args, **kwargs) if now else result
    finally:
        optimizer.param_groups[:] = groups
    return result


def _stand_ins(optimizer: Optimizer, *, needs_full: bool) -> dict[Tensor, StandIn]:
    """Stand-ins for sharded parameters; a plain shard needs one only if the optimizer needs the full tensor."""
    tensors = TENSORS.find(optimizer)
    if tensors is None:
        TENSORS.put(optimizer, tensors := {})
    return {
        param: StandIn(param, tensors, needs_full=needs_full)
        for param in _params(optimizer)
        if (needs_full or type(param) is not nn.Parameter) and (isinstance(param, DTensor) or SHARD.find(param))
    }


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
    kind: Any = type(optimizer)
    is_ours = _sharded(optimizer) or any(IS_OPEN.find(param) is not None for param in _params(optimizer))
    if is_ours and not hasattr(kind.step, "tp_steps"):  # torch has put its hooks around the step before the load
        kind.step = Optimizer.profile_hook_step(kind.step.__wrapped__)
        kind.step.hooked = True


def _load_state_dict(original: Callable[..., Any], optimizer: Optimizer, state_dict: Any, *args: Any) -> Any:
    """Shard full states, and reject those that another rank has pickled. Collective if parameters are shards."""
    params = list(_params(optimizer))
    group = next((shard.group for param in params if (shard := SHARD.find(param)) is not None), None)
    if group is not None:
        states = dict(state_dict["state"])
        names = [name for each in state_dict["param_groups"] for name in each["params"]]
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
    own = None if not isinstance(value, Tensor) or isinstance(value, HAS_LOCAL) else own_shard(value, shard, param)
    if own is None or own.shape == value.shape:
        return value
    return know(own, param) if is_sharded(param) else laid_out(own, param)


def _install() -> Undo:
    return replace_all(
        [
            (Optimizer, "profile_hook_step", _hook_step),
            (Optimizer, "add_param_group", _add_param_group),
            (Optimizer, "load_state_dict", _load_state_dict),
        ]
    )


def _reject(original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Reject shards in `Optimizer.add_param_group`, which every parameter goes through, if steps cannot be patched."""
    original(optimizer, *args, **kwargs)
    if _sharded(optimizer):
        STEPS_ON_SHARDS.refuse()


STEPS_ON_SHARDS = Patch("torch", "optimizers", _install, without=lambda: replace(Optimizer, "add_param_group", _reject))
"""Makes optimizers of torch and of other packages update shards as they update full parameters in one process."""
