"""Comparison and synchronisation of replicated tensors between the ranks of a model.

Each rank updates norms, replicated attention, vision towers and shared KV heads with gradients of its own, which should
be equal. A nondeterministic backward (scatters and some attention kernels on a GPU) makes gradients differ in their
last bits, and the values drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...logs import get_logger
from ...ranks import direct
from ...ranks.group import GROUP, TensorParallelGroup
from ...seams import Mixin
from ...strategies import SHARD, local_tensor, shard_of
from .same_inputs import check_arguments, hashes_of

CHUNK = 1 << 20
"""Elements per step of a fingerprint."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicatedSlice(NamedTuple):
    """The description of values that all of `ranks` hold; identical on every rank."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the `tp` axis; the values of the first one are the reference."""
    number: int
    """Index among the entries with the same name and ranks."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @staticmethod
    def of(name: str, ranks: tuple[int, ...], number: int, value: Tensor) -> ReplicatedSlice:
        """The description of `value`."""
        return ReplicatedSlice(name, ranks, number, tuple(value.shape), value.dtype, value.device.type)


def replicated_slices(
    name: str, param: Tensor, value: Tensor, size: int, joined: dict[str, Tensor]
) -> Iterator[tuple[ReplicatedSlice, Tensor]]:
    """Yield the slices of `value`, laid out like `param`, that other ranks hold too.

    A shard that is gathered from FSDP's shards is stored in `joined`, by name.
    """
    shard, local = shard_of(param), local_tensor(value)
    if shard is None:
        if not isinstance(param, DTensor):
            yield ReplicatedSlice.of(name, tuple(range(size)), 0, local), local
    elif shard.layout is None:
        if shard.resharded_over is None or shard.is_over_copies:
            yield ReplicatedSlice.of(name, tuple(range(size)), 0, local), local
    elif shared := shard.layout.split.shared(shard.group.rank):
        if shard.resharded_over is not None:
            local = joined[name] = shard.joined(local)
        numbers: dict[tuple[int, ...], int] = {}
        for indices in shared:
            number = numbers[indices.ranks] = numbers.get(indices.ranks, -1) + 1
            values = local.narrow(shard.layout.dim, indices.local, indices.length)
            yield ReplicatedSlice.of(name, indices.ranks, number, values), values


@torch.no_grad()
def check_replicas(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None = None, *, synchronize: bool = False
) -> dict[str, float]:
    """Compare tensors that several ranks of the `tp` axis hold. Collective over the `tp` axis.

    Costs a pass over these tensors and an all-gather of two numbers a tensor, so call it occasionally, such as before a
    checkpoint. Only tensors that differ are sent. Copies of a data-parallel model are not compared with each other:
    they get the same gradients.

    Args:
        model: a model loaded with `tp_plan`; its parameters and persistent buffers are compared bitwise.
        optimizer: its states with the shape of their parameter are compared too.
        synchronize: if True, ranks take the values of the lowest rank that holds the tensor, in place.

    Returns:
        {name: largest absolute difference}, with optimizer states as `NAME.exp_avg`. The same on all ranks of the axis;
        empty if no tensors differ.

    Raises:
        UnsupportedError: for a model without a plan.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("check_replicas needs a model that was loaded with tp_plan")
    if group.size == 1:
        return {}
    values = _values(model, optimizer)
    gathered: dict[str, Tensor] = {}
    shared = {
        entry: value for name in values for entry, value in replicated_slices(name, *values[name], group.size, gathered)
    }
    # 1. Fingerprints of all shared tensors, to find those that differ.
    fingerprints = torch.stack([_fingerprint(value) for value in shared.values()]).tolist() if shared else []
    per_rank = group.gather(dict(zip(shared, fingerprints, strict=True)))
    different = [
        entry for entry in dict.fromkeys(entry for own in per_rank for entry in own) if _differs(entry, per_rank)
    ]
    if not different:
        return {}
    # 2. Differences to the first rank's values, which replace the others.
    local_differences: dict[str, float] = {}
    for entry in different:
        first = _first(entry, shared.get(entry), group)
        if group.rank in entry.ranks:
            difference = _difference(shared[entry], first)
            local_differences[entry.name] = max(local_differences.get(entry.name, 0.0), difference, key=_badness)
            if synchronize:
                shared[entry].copy_(first)
    if synchronize:
        for name, full in gathered.items():
            param, value = values[name]
            local_tensor(value).copy_(full[slice(*SHARD.of(param).rows)])
    largest: dict[str, float] = {}
    for differences in group.gather(local_differences):
        for name, difference in differences.items():
            largest[name] = max(largest.get(name, 0.0), difference, key=_badness)
    return largest


def _values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return {name: (parameter or buffer, tensor with its layout: itself or an optimizer's state)}."""
    values: dict[str, tuple[Tensor, Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            values[name] = (buffer, buffer)
    for name, param in model.named_parameters():
        values[name] = (param, param)
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                values[f"{name}.{key}"] = (param, value)
    return values


def _fingerprint(value: Tensor) -> Tensor:
    """Return two sums modulo 2**64 of the bits of a tensor, the second weighted by position: (2,), int64."""
    flat = value.contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits = flat.view(_BITS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), CHUNK):
        chunk = bits[start : start + CHUNK].long()
        weights = torch.arange(start, start + len(chunk), device=value.device) * 2 + 1
        sums += torch.stack([chunk.sum(), (chunk * (weights * 0x9E3779B97F4A7C1)).sum()])
    return sums


def _differs(entry: ReplicatedSlice, per_rank: list[Mapping[ReplicatedSlice, list[int]]]) -> bool:
    """True if all ranks that should hold `entry` have it, and their fingerprints differ."""
    fingerprints = [per_rank[rank].get(entry) for rank in entry.ranks]
    return all(fingerprint is not None for fingerprint in fingerprints) and any(
        fingerprint != fingerprints[0] for fingerprint in fingerprints
    )


def _first(entry: ReplicatedSlice, value: Tensor | None, group: TensorParallelGroup) -> Tensor:
    """Broadcast the `value` of the first rank that holds `entry` to all ranks of the axis.

    All ranks of the axis join the broadcast, so no process group of the holders is needed.
    """
    if value is not None:
        first = value.contiguous().clone()
    else:
        first = torch.empty(entry.shape, dtype=entry.dtype, device=entry.device_type)
    is_short = first.ndim and first.element_size() == 1  # float8 and bool, which some backends cannot send
    direct.broadcast(first.view(torch.uint8) if is_short else first, group.process_group, entry.ranks[0])
    return first


def _difference(value: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return (value.to(wide) - reference.to(wide)).abs().max().item() if value.numel() else 0.0


def _badness(difference: float) -> float:
    """Sort key: NaN is the largest difference."""
    return float("inf") if difference != difference else difference


logger = get_logger(__name__)

SAMPLES = 16
"""Number of evenly spaced values of each tensor that are compared."""
TOLERANCE = 1e-3
"""Relative difference above which values have drifted; another order of summation in a kernel stays below."""


class DriftingModel(Mixin):
    """Methods of a loaded model that compare samples of its parameters, and the arguments of `generate`."""

    tp_group: TensorParallelGroup

    def _tp_sample(self, arguments: Mapping[str, Any] | None = None) -> Any:
        hashes = {} if arguments is None else hashes_of(self, arguments)
        return sample(self, self.tp_group), hashes  # type: ignore[arg-type]

    def _tp_compare(self, samples: Sequence[Any]) -> None:
        warn_of_drift([values for values, _ in samples], self.tp_group.rank)
        check_arguments([hashes for _, hashes in samples])


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
