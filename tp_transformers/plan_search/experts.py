"""Matching of the parameters of merged experts: slices of one that make the features another takes.

A change to the slice that makes a feature changes one slice of the gradient of the parameter that takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..anatomy.linears import stacked_experts
from ..torch_api import tree_map_only

TRIED = 32
"""Indices that are tried along each dim of a parameter."""
ROWS = 2
"""Tokens that merged experts are run with; the time grows with the number of experts they take."""


@dataclass(frozen=True)
class Feeds:
    """The features of the down projection that the indices of one parameter along `dim` make."""

    dim: int
    features: tuple[int | None, ...]
    """Feature that each index along `dim` makes; None if none was seen."""
    width: int


def probe_experts(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Feeds]:
    """{parameter: the features it makes or takes}, for merged experts.

    The down projection is the matrix with a gradient that changes in one slice along a dim, for each change of another
    parameter. The result is empty without one. `args` and `kwargs` are those of the module's forward.
    """
    params = {name: param.detach().double() for name, param in module.named_parameters()}
    is_stacked = stacked_experts(module) > 0
    changes: dict[tuple[str, int, int], dict[str, Tensor]] = {}
    ids = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not value.is_floating_point()]
    all_rows = is_stacked or not ids  # tokens that come sorted by expert have no ids

    def prepare(value: Tensor) -> Tensor:
        rows = value if all_rows else value[:ROWS]
        return rows.double() if rows.is_floating_point() else rows

    args, kwargs = tree_map_only(Tensor, prepare, (args, kwargs))

    def gradients(values: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        output = torch.func.functional_call(module, leaves, args, kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)
        found = torch.autograd.grad((output * weights).sum(), list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(values[name]) if gradient is None else gradient
            for name, gradient in zip(leaves, found, strict=True)
        }

    before = gradients(params)

    def changed(name: str, dim: int, index: int) -> dict[str, Tensor]:
        if (name, dim, index) not in changes:
            other = params[name].clone()
            other.select(dim, index).mul_(1.5).add_(0.1)
            after = gradients({**params, name: other})
            changes[name, dim, index] = {
                key: (after[key] - before[key]).abs() > 1e-9 * before[key].abs().max() for key in params
            }
        return changes[name, dim, index]

    matrices = [name for name, param in params.items() if param.ndim == 3 or is_stacked]
    for down in matrices:
        for taken in (0,) if is_stacked else (1, 2):
            feeds: dict[str, Feeds] = {}
            for name, param in params.items():
                for dim in (0,) if is_stacked else range(1, param.ndim):
                    if name == down:
                        continue
                    length = param.shape[dim]
                    made: list[int | None] = [None] * length
                    for index in sorted({*range(min(length, TRIED // 2)), *range(0, length, -(-length // TRIED))}):
                        slices = changed(name, dim, index)[down].movedim(taken, 0).flatten(1).any(1).nonzero().flatten()
                        if len(slices) > 1:
                            break
                        made[index] = int(slices) if len(slices) else None
                    else:
                        if any(feature is not None for feature in made):
                            feeds[name] = Feeds(dim, tuple(made), params[down].shape[taken])
            if feeds and {*matrices} <= {*feeds, down}:
                width = params[down].shape[taken]
                return {**feeds, down: Feeds(taken, tuple(range(width)), width)}
    return {}
