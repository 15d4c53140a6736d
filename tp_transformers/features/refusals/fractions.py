"""Fractions of a model on each rank and on all ranks; a check that rejects plans that replicate most of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...anatomy import fold_layers, stacks
from ...errors import PlanError
from ...plans.binding import Binding
from ...slices.layout import Layout

MOST_REPLICATED = 0.75
"""Maximum fraction of a model's bytes that a declared plan may replicate: a vision tower, say, but not all layers."""


def check_layers_are_sharded(bound: Binding) -> None:
    """Note if a declared plan replicates layers, with the replicated fraction of the model.

    Raises PlanError if more than MOST_REPLICATED of the model would be replicated, unless `allow_replicated` is set.
    """
    plan = bound.plan
    layers = _replicated_layers(bound.model, bound.layouts) if plan.declared and bound.size > 1 else {}
    if not layers:
        return
    nbytes = {name: param.nbytes for name, param in bound.model.named_parameters()}
    kept = sum(count for name, count in nbytes.items() if bound.layouts.get(name) is None)
    replicated = kept / max(1, sum(nbytes.values()))
    share = f"{max(shares(bound.model, bound.layouts, bound.size)):.0%} of the model"
    if replicated > MOST_REPLICATED and not plan.options.get("allow_replicated"):
        raise PlanError(
            plan.source,
            got=f"no rule that shards a matrix of {', '.join(layers)}, so that each of {bound.size} ranks would hold "
            f"{share}",
            expected=f"a plan that leaves at most {MOST_REPLICATED:.0%} on every rank",
            fix="Pass allow_replicated=True (--allow-replicated) to load it so, or a plan of your own: "
            "`tp-transformers suggest` writes one.",
        )
    counts = ", ".join(f"{sum(flags)} of {len(flags)} {stack}" for stack, flags in layers.items())
    bound.notes.append(
        f"{plan.source} replicates {counts}: {replicated:.0%} of the model is on every rank, and the largest of "
        f"{bound.size} ranks holds {share}"
    )


def _replicated_layers(model: nn.Module, layouts: Mapping[str, Layout | None]) -> dict[str, list[bool]]:
    """Stacks of layers with matrices: {folded name: for each layer, whether all matrices are replicated}, if any is."""
    found: dict[str, list[bool]] = {}
    for stack, layers in stacks(model):
        for step, layer in layers.named_children():
            name = f"{stack}.{step}"
            matrices = [path for path, param in layer.named_parameters() if param.ndim > 1 and "." in path]
            if matrices:
                is_replicated = all(layouts.get(f"{name}.{matrix}") is None for matrix in matrices)
                found.setdefault(fold_layers(name), []).append(is_replicated)
    return {name: flags for name, flags in sorted(found.items()) if any(flags)}


def shares(model: nn.Module, layouts: Mapping[str, Layout | None], size: int) -> list[float]:
    """Bytes on every rank, as fractions of the full model; a tied parameter counts once."""
    total, rank_bytes = 0, torch.zeros(size, dtype=torch.float64)
    for name, param in model.named_parameters():
        total += param.nbytes
        layout = layouts.get(name)
        widths = (1,) * size if layout is None else layout.split.widths
        rank_bytes += torch.tensor(widths) * (param.nbytes / (1 if layout is None else param.shape[layout.dim]))
    return (rank_bytes / total).tolist() if total else [1.0] * size
