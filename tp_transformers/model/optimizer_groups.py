"""Parameters in groups that torch's optimizers take: DTensors of one mesh, or plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..patches import Patch


def parameter_groups(
    parameters: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Groups for an optimizer, in each of which all parameters are DTensors of one mesh, or all are plain.

    torch's optimizers compute a group at a time (`foreach`, `fused`), and its operators refuse to mix DTensors with
    plain tensors or with those of another mesh. Values and states do not depend on the grouping. The optimizers of
    torch that know `foreach` need no such groups once a model has been loaded with a plan: see `SPLIT_STEPS`.

    Args:
        parameters: a model, parameters, or groups of an optimizer, each of which keeps its other settings.
    """
    if isinstance(parameters, nn.Module):
        parameters = list(parameters.parameters())
    given = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    result: list[dict[str, Any]] = []
    for group in groups:
        assert isinstance(group, Mapping)
        held = group["params"]
        kinds: dict[Any, list[Any]] = {}
        for param in [held] if isinstance(held, Tensor) else held:
            kinds.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
        result += [{**group, "params": params} for params in kinds.values()]
    return result


def _split_step(
    optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a step: another optimizer of the same state, whose groups are not mixed, takes it."""
    if not type(optimizer).__module__.startswith("torch.optim.") or "foreach" not in optimizer.defaults:
        return None
    groups = parameter_groups(optimizer.param_groups)
    if len(groups) == len(optimizer.param_groups):
        return None
    apart = object.__new__(type(optimizer))
    apart.__dict__.update(vars(optimizer), param_groups=groups)
    return (apart, *args[1:]), keywords


SPLIT_STEPS = Patch("torch", "optimizer step pre-hook", lambda: register_optimizer_step_pre_hook(_split_step).remove)
"""Lets every optimizer of torch that knows `foreach` take groups that mix DTensors with plain parameters.

Each of its steps computes with the groups of `parameter_groups`; `param_groups` and states stay as they are.
"""
