"""Compare loaded shards with the unsharded model, loaded by transformers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tp_transformers import full_tensor

from .memory import local


class WrongResultError(Exception):
    """A load whose values differ from the checkpoint; it is not timed."""


def check(model: Any, folder: Path, *, rank: int, size: int, collectives: bool) -> int:
    """Compare every parameter and persistent buffer of `model` with the checkpoint; returns their number.

    Args:
        model: loaded by transformers or by this package, on rank `rank` of `size`.
        folder: the checkpoint.
        collectives: True if the other ranks exist: gather and compare each full tensor (collective). Otherwise compare
            this rank's shard with the slice of its layout.

    Raises:
        WrongResultError: with the tensors that differ, that were not loaded, or that the checkpoint lacks.
    """
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    found = model.state_dict(keep_vars=True)
    faults = [f"{name}: not in the checkpoint" for name in sorted(found.keys() - expected.keys())]
    faults += [f"{name}: not in the model" for name in sorted(expected.keys() - found.keys())]
    for name in sorted(found.keys() & expected.keys()):
        value = (full_tensor(found[name]) if collectives else local(found[name])).cpu()
        whole = expected[name] if collectives else _shard(expected[name], found[name], rank, size)
        if value.dtype != whole.dtype or value.shape != whole.shape or not torch.equal(value, whole):
            faults.append(f"{name}: differs from the checkpoint")
    if faults:
        shown = "\n  ".join(faults[:10])
        raise WrongResultError(f"rank {rank}: {len(faults)} of {len(expected)} tensors are wrong:\n  {shown}")
    return len(expected)


def _shard(whole: Tensor, tensor: Tensor, rank: int, size: int) -> Tensor:
    """The slice of the full tensor that a rank should hold, by the layout's ranges or the DTensor's placement."""
    shard = getattr(tensor, "tp_shard", None)
    if shard is not None:
        if shard.layout is None:
            return whole
        ranges = shard.layout.split.ranges[rank]
        return torch.cat(
            [whole.narrow(shard.layout.dim, start, stop - start) for start, stop in ranges], shard.layout.dim
        )
    placement = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    if not hasattr(placement, "dim"):
        return whole
    groups = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
    return torch.cat([group.chunk(size, placement.dim)[rank] for group in groups], placement.dim)
