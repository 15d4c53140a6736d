"""Parameters in groups that torch's optimizers take: DTensors of one mesh, or plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def parameter_groups(
    parameters: nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Groups for an optimizer; the parameters of each are all DTensors of one mesh, or all plain.

    torch's operators on many tensors (`torch._foreach_*`) reject a mix of DTensors with plain tensors or with DTensors
    of another mesh. Values and states do not depend on the grouping. Optimizers do not need such groups once a model
    has been loaded with a plan (see `STEPS_ON_SHARDS`): they are for your own code that computes a group at a time.

    Args:
        parameters: a model, parameters, or groups of an optimizer; each group keeps its other settings.
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
