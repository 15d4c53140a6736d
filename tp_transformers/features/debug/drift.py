"""Samples of values that several ranks hold, compared when ranks generate or save, to detect drift.

Norms and replicated KV heads stay equal on all ranks as long as all ranks change them identically. Random numbers from
different seeds, or a change on one rank alone, let them drift apart without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...logs import get_logger
from ...ranks.group import TensorParallelGroup
from ...strategies import shard_of
from .replicas import replicated_slices

_Model: Any = object
"""Base of the mixin; in the class of a model, a PreTrainedModel follows it in the MRO."""

logger = get_logger(__name__)

SAMPLES = 16
"""Number of evenly spaced values of each tensor that are compared."""
TOLERANCE = 1e-3
"""Relative difference above which values have drifted; another order of summation in a kernel stays below."""


class DriftingModel(_Model):
    """Methods of a loaded model that compare samples of its parameters."""

    tp_group: TensorParallelGroup

    def _tp_sample(self) -> Any:
        return sample(self, self.tp_group)  # type: ignore[arg-type]

    def _tp_compare(self, samples: Sequence[Any]) -> None:
        warn_of_drift(samples, self.tp_group.rank)


Sample = dict[tuple[str, tuple[int, ...], int], list[float]]


@torch.no_grad()
def sample(model: nn.Module, group: TensorParallelGroup) -> Sample:
    """Take a few values of each parameter of `model` that other ranks hold too, without communication."""
    sampled: dict[tuple[str, tuple[int, ...], int], Tensor] = {}
    for name, param in model.named_parameters():
        shard = shard_of(param)
        if param.is_meta or not param.is_floating_point() or (shard is not None and shard.resharded_over is not None):
            continue
        for entry, value in replicated_slices(name, param, param, group.size, {}):
            flat = value.reshape(-1) if value.is_contiguous() else value[:1].reshape(-1)
            sampled[entry.name, entry.ranks, entry.number] = flat[:: max(len(flat) // SAMPLES, 1)][:SAMPLES].float()
    if not sampled:
        return {}
    values = iter(torch.cat(list(sampled.values())).tolist())
    return {key: [next(values) for _ in range(len(tensor))] for key, tensor in sampled.items()}


def warn_of_drift(samples: Sequence[Sample], rank: int) -> None:
    """Log on rank 0 the parameters with samples that differ between ranks."""
    if rank != 0 or any(holder >= len(samples) for keys in samples for _, holders, _ in keys for holder in holders):
        return  # a rank without a sample is in another collective
    drifted: dict[str, float] = {}
    for name, holders, number in dict.fromkeys(key for keys in samples for key in keys):
        values = [samples[holder].get((name, holders, number)) for holder in holders]
        first = values[0]
        if first is None:
            continue
        scale = max((abs(value) for value in first), default=0.0) or 1.0
        for replica in values[1:]:
            pairs = zip(first, replica or first, strict=True)
            difference = max((abs(a - b) for a, b in pairs), default=0.0) / scale
            if difference > TOLERANCE:
                drifted[name] = max(drifted.get(name, 0.0), difference)
    if drifted:
        logger.warning(
            "ranks hold other values of %d parameters that have to be identical on all ranks, such as %s (off by %.0e "
            "of its largest value). Were random numbers drawn with another seed on each rank, or was a parameter "
            "changed on one rank? tp_transformers.debug.check_replicas(model, synchronize=True) gives all ranks rank "
            "0's values.",
            len(drifted),
            *max(drifted.items(), key=lambda item: item[1]),
        )
