"""Matching of the parameters of merged experts: slices that make the features which the down projection takes.

A change of the slice that makes a feature changes one slice of the down projection's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_api import tree_map_only
from .seen import stacked_experts

TRIED = 32
"""Number of indices tried along each dim of a parameter."""
ROWS = 2
"""Number of tokens that merged experts are run with; the time grows with the number of chosen experts."""


@dataclass(frozen=True)
class Feeds:
    """Features of the down projection that each index of one parameter along `dim` makes."""

    dim: int
    features: tuple[int | None, ...]
    """Feature that each index along `dim` makes; None if none was seen."""
    width: int


def probe_experts(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Feeds]:
    """Find the features that the parameters of merged experts make or take: {parameter: features}.

    The down projection is the matrix with a gradient that changes in a single slice along a dim for each change of
    another parameter. Without one, the result is empty. `args` and `kwargs`: of the module's forward.
    """
    is_stacked = stacked_experts(module) > 0
    probe = _Probe(module, args, kwargs, is_stacked)
    matrices = {name for name, param in probe.params.items() if param.ndim == 3 or is_stacked}
    for down in (name for name in probe.params if name in matrices):
        for taken in (0,) if is_stacked else (1, 2):
            width = probe.params[down].shape[taken]
            feeds: dict[str, Feeds] = {}
            for name, param in probe.params.items():
                for dim in (0,) if is_stacked else range(1, param.ndim):
                    made = probe.features(name, dim, down, taken) if name != down else ()
                    if any(feature is not None for feature in made):
                        feeds[name] = Feeds(dim, made, width)
            if feeds and matrices <= {*feeds, down}:
                return {**feeds, down: Feeds(taken, tuple(range(width)), width)}
    return {}


class _Probe:
    """Merged experts in fp64, and the gradients that a change of each slice changes."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, is_stacked: bool) -> None:
        self.module = module
        self.params = {name: param.detach().double() for name, param in module.named_parameters()}
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        # Tokens that are sorted by expert come without expert ids; keep all of them.
        all_rows = is_stacked or all(value.is_floating_point() for value in inputs)

        def prepare(value: Tensor) -> Tensor:
            rows = value if all_rows else value[:ROWS]
            return rows.double() if rows.is_floating_point() else rows

        self.args, self.kwargs = tree_map_only(Tensor, prepare, (args, kwargs))
        self.before = self._gradients(self.params)
        self._changes: dict[tuple[str, int, int], dict[str, Tensor]] = {}

    def features(self, name: str, dim: int, down: str, taken: int) -> tuple[int | None, ...]:
        """Index of `down` along `taken` that each index of `name` along `dim` makes; empty if one makes several."""
        length = self.params[name].shape[dim]
        made: list[int | None] = [None] * length
        for index in sorted({*range(min(length, TRIED // 2)), *range(0, length, -(-length // TRIED))}):
            slices = self._changed(name, dim, index)[down].movedim(taken, 0).flatten(1).any(1).nonzero().flatten()
            if len(slices) > 1:
                return ()
            made[index] = int(slices) if len(slices) else None
        return tuple(made)

    def _changed(self, name: str, dim: int, index: int) -> dict[str, Tensor]:
        """Masks of the gradient elements that change with one slice of the parameter `name`."""
        if (name, dim, index) not in self._changes:
            changed = self.params[name].clone()
            changed.select(dim, index).mul_(1.5).add_(0.1)
            after = self._gradients({**self.params, name: changed})
            self._changes[name, dim, index] = {
                key: (after[key] - before).abs() > 1e-9 * before.abs().max() for key, before in self.before.items()
            }
        return self._changes[name, dim, index]

    def _gradients(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        output = torch.func.functional_call(self.module, leaves, self.args, self.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)
        gradients = torch.autograd.grad((output * weights).sum(), list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(values[name]) if gradient is None else gradient
            for name, gradient in zip(leaves, gradients, strict=True)
        }
