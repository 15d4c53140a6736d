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
    entries = list(parameters)
    groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    result: list[dict[str, Any]] = []
    for group in groups:
        assert isinstance(group, Mapping)
        group_params = group["params"]
        kinds: dict[Any, list[Any]] = {}
        for param in [group_params] if isinstance(group_params, Tensor) else group_params:
            kinds.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
        result += [{**group, "params": params} for params in kinds.values()]
    return result
