"""Fractions of a model on each rank and on all ranks; a check that rejects plans that replicate most of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..anatomy import fold_layers, layer_around
from ..errors import PlanError
from ..slices.layout import Layout
from .bind import Resolution
from .rules import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_REPLICATED = 0.75
"""Maximum fraction of a model's bytes that a declared plan may replicate: a vision tower, say, but not all layers."""


def check_layers_are_sharded(
    model: PreTrainedModel, plan: Plan, resolution: Resolution, size: int, *, allow_replicated: bool = False
) -> str | None:
    """A warning if a declared plan replicates layers, with the replicated fraction of the model; None for other plans.

    Raises PlanError if more than MOST_REPLICATED of the model would be replicated, unless `allow_replicated`.
    """
    stacks = _replicated_layers(model, resolution.layouts) if plan.declared and size > 1 else {}
    if not stacks:
        return None
    replicated = replicated_share(model, resolution.layouts)
    share = f"{largest_fraction(model, resolution.layouts, size):.0%} of the model"
    if replicated > MOST_REPLICATED and not allow_replicated:
        raise PlanError(
            plan.source,
            got=f"no rule that shards a matrix of {', '.join(stacks)}, so that each of {size} ranks would hold {share}",
            expected=f"a plan that leaves at most {MOST_REPLICATED:.0%} on every rank",
            fix="Pass allow_replicated=True (--allow-replicated) to load it so, or a plan of your own: "
            "`tp-transformers suggest` writes one.",
        )
    counts = ", ".join(f"{unsharded} of {layers} {stack}" for stack, (unsharded, layers) in stacks.items())
    return (
        f"{plan.source} replicates {counts}: {replicated:.0%} of the model is on every rank, and the largest of "
        f"{size} ranks holds {share}"
    )


def _replicated_layers(model: PreTrainedModel, layouts: Mapping[str, Layout | None]) -> dict[str, tuple[int, int]]:
    """Stacks with layers that have no sharded matrix: {folded name: (such layers, all layers)}."""
    is_replicated: dict[str, bool] = {}
    for name, param in model.named_parameters():
        layer = layer_around(model, name)
        if layer is not None and param.ndim > 1:
            is_replicated[layer] = is_replicated.get(layer, True) and layouts.get(name) is None
    stacks: dict[str, list[bool]] = {}
    for layer, replicated in is_replicated.items():
        stacks.setdefault(fold_layers(layer), []).append(replicated)
    return {stack: (sum(flags), len(flags)) for stack, flags in sorted(stacks.items()) if any(flags)}


def largest_fraction(model: PreTrainedModel, layouts: Mapping[str, Layout | None], size: int) -> float:
    """Bytes on the rank that holds most, as a fraction of the full model."""
    return max(shares(model, layouts, size))


def shares(model: PreTrainedModel, layouts: Mapping[str, Layout | None], size: int) -> list[float]:
    """Bytes on every rank, as fractions of the full model; a tied parameter counts once."""
    total, rank_bytes = 0, torch.zeros(size, dtype=torch.float64)
    for name, param in model.named_parameters():
        total += param.nbytes
        layout = layouts.get(name)
        widths = (1,) * size if layout is None else layout.split.widths
        rank_bytes += torch.tensor(widths) * (param.nbytes / (1 if layout is None else param.shape[layout.dim]))
    return (rank_bytes / total).tolist() if total else [1.0] * size


def replicated_share(model: PreTrainedModel, layouts: Mapping[str, Layout | None]) -> float:
    """Bytes of replicated parameters, as a fraction of the full model."""
    nbytes = {name: param.nbytes for name, param in model.named_parameters()}
    replicated = sum(count for name, count in nbytes.items() if layouts.get(name) is None)
    return float(replicated / max(1, sum(nbytes.values())))
