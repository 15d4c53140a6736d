"""The targets of a load: every parameter and buffer of a model as slices of checkpoint tensors; nothing is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..checkpoint.conversion.convert import Conversion, own_dtypes
from ..checkpoint.reading.header import Checkpoint
from ..errors import CheckpointError
from ..marks import untyped
from ..slices.layout import Layout
from ..slices.lazy import LazyTensor
from ..strategies import take, unsharded_like
from .request import LoadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Targets:
    """The parameters and persistent buffers of a model, by name."""

    full: Mapping[str, torch.Tensor]
    """Meta tensors of the full shapes, also of those that the checkpoint lacks."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes in memory."""
    layouts: Mapping[str, Layout | None]
    """Indices that each rank holds of a sharded tensor; None if it is replicated."""
    conversion: Conversion
    """Full values as expressions over checkpoint tensors."""
    mismatched: set[tuple[str, torch.Size, torch.Size]]
    """(name, shape in the checkpoint, shape in the model) of tensors of other shapes; they are initialised anew."""

    def shards(self, rank: int) -> dict[str, LazyTensor]:
        """The slices that `rank` holds; for a pre-sharded checkpoint, this opens the files with them."""
        expressions = self.conversion.expressions
        return {name: take(expression, self.layouts.get(name), rank) for name, expression in expressions.items()}


def describe(
    model: PreTrainedModel, checkpoint: Checkpoint, layouts: Mapping[str, Layout | None], request: LoadRequest
) -> Targets:
    """Describe each parameter and persistent buffer of `model` in terms of checkpoint tensors.

    Raises CheckpointError on tensors of the wrong shape, unless `ignore_mismatched_sizes` is set.
    """
    full = {name: unsharded_like(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: tensor.shape for name, tensor in full.items()}
    conversion = request.encoding.convert(model, checkpoint.tensors, shapes, request)
    applied = request.storage.applied(request.config.weight_mapping or ())
    if applied is not None:
        untyped(model)._weight_conversions = list(applied)
    mismatched = {
        (name, expression.shape, shapes[name])
        for name, expression in conversion.expressions.items()
        if expression.shape != shapes[name]
    }
    if mismatched and not request.config.ignore_mismatched_sizes:
        lines = (f"\n  - {name}: got {tuple(got)}, expected {tuple(want)}" for name, got, want in sorted(mismatched))
        raise CheckpointError(
            f"checkpoint {request.config.pretrained_model_name_or_path}: tensors of the wrong shape:{''.join(lines)}\n"
            "Correct the config, or pass ignore_mismatched_sizes=True to initialise them anew."
        )
    for name, _, _ in mismatched:
        del conversion.expressions[name]
    dtypes = {name: tensor.dtype for name, tensor in full.items()} | own_dtypes(full, request.config.dtype_plan)
    return Targets(full, dtypes, layouts, conversion, mismatched)
