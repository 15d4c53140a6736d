"""Shares: how much of a model each rank holds, and how much of it every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..anatomy.layers import layer_around
from ..anatomy.names import fold_layers
from ..errors import PlanError
from ..slices.layout import Layout
from .bind import Resolution
from .rules import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_layers_are_cut(model: PreTrainedModel, plan: Plan, resolution: Resolution, size: int) -> str | None:
    """A warning if a plan leaves some layers of a stack on every rank, with the share that the largest one holds.

    Raises PlanError where it leaves all layers of a stack.
    """
    whole = _whole_layers(model, resolution.layouts) if size > 1 else {}
    if not whole:
        return None
    share = f"{largest_share(model, resolution.layouts, size):.0%} of the model"
    stacks = [stack for stack, (uncut, layers) in whole.items() if uncut == layers]
    if stacks:
        raise PlanError(
            plan.source,
            got=f"no rule that cuts a matrix of {', '.join(stacks)}, so that each of {size} ranks would hold {share}",
            expected="a plan that cuts every layer",
            fix="Pass allow_replicated=True to load it so, or a plan of your own: a dict or a YAML file.",
        )
    counts = ", ".join(f"{uncut} of {layers} {stack}" for stack, (uncut, layers) in whole.items())
    return f"{plan.source} leaves {counts} whole on every rank; the largest of {size} ranks holds {share}"


def _whole_layers(model: PreTrainedModel, layouts: Mapping[str, Layout | None]) -> dict[str, tuple[int, int]]:
    """Stacks of layers of which every rank would hold some whole: {folded name: (such layers, all layers)}."""
    is_whole: dict[str, bool] = {}
    for name, param in model.named_parameters():
        layer = layer_around(model, name)
        if layer is not None and param.ndim > 1:
            is_whole[layer] = is_whole.get(layer, True) and layouts.get(name) is None
    stacks: dict[str, list[bool]] = {}
    for layer, whole in is_whole.items():
        stacks.setdefault(fold_layers(layer), []).append(whole)
    return {stack: (sum(whole), len(whole)) for stack, whole in sorted(stacks.items()) if any(whole)}


def largest_share(model: PreTrainedModel, layouts: Mapping[str, Layout | None], size: int) -> float:
    """The bytes of the largest rank's shard, as a fraction of the whole model."""
    return max(shares(model, layouts, size))


def shares(model: PreTrainedModel, layouts: Mapping[str, Layout | None], size: int) -> list[float]:
    """The bytes of every rank's shard, as fractions of the whole model; a tied parameter counts once."""
    total, held = 0, torch.zeros(size, dtype=torch.float64)
    for name, param in model.named_parameters():
        total += param.nbytes
        layout = layouts.get(name)
        widths = (1,) * size if layout is None else layout.split.widths
        held += torch.tensor(widths) * (param.nbytes / (1 if layout is None else param.shape[layout.dim]))
    return (held / total).tolist() if total else [1.0] * size
