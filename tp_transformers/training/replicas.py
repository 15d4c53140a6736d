"""Values that several ranks of a model hold, compared between them and brought together.

Norms, replicated attention and vision towers, shared KV heads: each rank updates them by gradients that it computes
alike. A backward that is not deterministic, as of scatters and of some attention kernels on a GPU, gives ranks
gradients that differ in their last bits, and nothing brings the values together again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..ranks import direct
from ..ranks.group import GROUP, TensorParallelGroup
from ..strategies import SHARD, local_tensor
from ..strategies.shards.replicas import Part, parts

CHUNK = 1 << 20
"""Elements of a fingerprint that are computed at a time."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_replicas(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer | None = None, *, synchronize: bool = False
) -> dict[str, float]:
    """Compare tensors that ranks of the `tp` axis share; all ranks have to call it, the ranks of one copy at
    least.

    It takes a pass over these values and an all-gather of two numbers a tensor, so call it now and then, such as before
    a checkpoint. Only values that differ travel. Copies of a data-parallel model are not compared with each other:
    they are given the same gradients.

    Args:
        model: a model loaded with `tp_plan`; its parameters and persistent buffers are compared, bit by bit.
        optimizer: an optimizer with states that are compared too, where they have the shape of their parameter.
        synchronize: whether ranks take the values of the lowest rank that holds them, in place.

    Returns:
        By name, the largest absolute difference that was found; the state of an optimizer is `NAME.exp_avg` and such.
        The same on all ranks of the axis, and empty where nothing has drifted apart.

    Raises:
        UnsupportedError: for a model without a plan.
    """
    group = GROUP.find(model)
    if group is None:
        raise UnsupportedError("check_replicas needs a model that was loaded with tp_plan")
    if group.size == 1:
        return {}
    values = _values(model, optimizer)
    joined: dict[str, Tensor] = {}
    shared = {part: value for name in values for part, value in parts(name, *values[name], group.size, joined)}
    # 1. Fingerprints, which tell what differs.
    prints = torch.stack([_fingerprint(value) for value in shared.values()]).tolist() if shared else []
    everyone = group.gather(dict(zip(shared, prints, strict=True)))
    different = [
        part for part in dict.fromkeys(part for found in everyone for part in found) if _differs(part, everyone)
    ]
    if not different:
        return {}
    # 2. By how much, and the first one's values in place of the others'.
    own: dict[str, float] = {}
    for part in different:
        first = _first(part, shared.get(part), group)
        if group.rank in part.ranks:
            difference = _difference(shared[part], first)
            own[part.name] = max(own.get(part.name, 0.0), difference, key=_badness)
            if synchronize:
                shared[part].copy_(first)
    if synchronize:
        for name, whole in joined.items():
            param, value = values[name]
            local_tensor(value).copy_(whole[slice(*SHARD.of(param).rows)])
    found: dict[str, float] = {}
    for differences in group.gather(own):
        for name, difference in differences.items():
            found[name] = max(found.get(name, 0.0), difference, key=_badness)
    return found


def _values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: a parameter or buffer, and a tensor that is laid out like it (itself, or an optimizer's state of it)."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            found[name] = (buffer, buffer)
    for name, param in model.named_parameters():
        found[name] = (param, param)
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                found[f"{name}.{key}"] = (param, value)
    return found


def _fingerprint(value: Tensor) -> Tensor:
    """Two sums modulo 2**64 of the bits of a tensor, the second weighted by position: (2,), int64."""
    flat = value.contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    bits = flat.view(_BITS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=value.device)
    for start in range(0, len(bits), CHUNK):
        chunk = bits[start : start + CHUNK].long()
        weights = torch.arange(start, start + len(chunk), device=value.device) * 2 + 1
        sums += torch.stack([chunk.sum(), (chunk * (weights * 0x9E3779B97F4A7C1)).sum()])
    return sums


def _differs(part: Part, everyone: list[Mapping[Part, list[int]]]) -> bool:
    """True if the ranks that hold `part`, and all have it by now, have other values than the first of them."""
    found = [everyone[rank].get(part) for rank in part.ranks]
    return all(each is not None for each in found) and any(each != found[0] for each in found)


def _first(part: Part, value: Tensor | None, group: TensorParallelGroup) -> Tensor:
    """The `value` of the first rank that holds `part`, on all ranks of the axis, also those that hold none of it.

    A broadcast over the axis needs no process group of the holders alone.
    """
    if value is not None:
        first = value.contiguous().clone()
    else:
        first = torch.empty(part.shape, dtype=part.dtype, device=part.device_type)
    is_short = first.ndim and first.element_size() == 1  # float8 and bool, which not every backend sends
    direct.broadcast(first.view(torch.uint8) if is_short else first, group.process_group, part.ranks[0])
    return first


def _difference(value: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return (value.to(wide) - other.to(wide)).abs().max().item() if value.numel() else 0.0


def _badness(difference: float) -> float:
    """A difference that is not a number is the largest of all."""
    return float("inf") if difference != difference else difference
