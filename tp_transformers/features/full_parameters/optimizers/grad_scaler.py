"""torch's GradScaler on shards: all ranks skip a step, or none does.

`torch.amp.GradScaler` looks for infinities in the gradients of one process. For DTensors, torch reduces the result over
their mesh; for plain shards it does not, and it rejects a mix of both. One rank would skip a step that another takes,
and they would scale the next loss by different factors. So for optimizers with parameters of a tensor-parallel model,
the scaler checks this rank's local gradients, and the result is reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ....model.clip import with_gradient
from ....patches import Patch, replace, replace_all
from ....ranks import direct
from ....strategies.shards.shard import SHARD, finish_gradient, local_tensor
from .stand_ins import groups_of

Infinities = dict[torch.device, Tensor]
"""For each device, a number above 0 if a gradient there is not finite."""


def _unscale_shared(
    unscale: Callable[..., Infinities],
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> Infinities:
    """Run `unscale`, torch's `GradScaler._unscale_grads_`, on local gradients, and reduce the result over the ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    groups = groups_of(params)
    if not groups:
        return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    grads = [local_tensor(grad) for grad in map(finish_gradient, params) if grad is not None]
    local = SimpleNamespace(param_groups=[{"params": [with_gradient(grad) for grad in grads]}])
    return _reduce(unscale(scaler, local, inv_scale, found_inf, allow_fp16), groups)


def _has_shards(_: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
    return any(SHARD.find(param) is not None for group in optimizer.param_groups for param in group["params"])


SHARED_INFINITIES: Patch = Patch(
    "torch",
    "GradScaler",
    partial(replace, GradScaler, "_unscale_grads_", _unscale_shared),
    without=lambda: replace_all(
        (GradScaler, name, SHARED_INFINITIES.refusing(_has_shards)) for name in ("step", "unscale_")
    ),
)
"""Reduces infinities over the ranks: an all-reduce of two numbers per sharded axis when gradients are unscaled."""


def _reduce(infinities: Infinities, groups: Mapping[dist.ProcessGroup, torch.device]) -> Infinities:
    """Reduce `infinities` over all ranks, also on a rank that has no gradient while another has one."""
    device = next(iter(groups.values()))
    infinite = [value.to(device) for value in infinities.values()]
    total = torch.stack([*infinite, torch.zeros((), device=device)]).amax()
    total = torch.stack([total, torch.full_like(total, bool(infinities))])
    for group in groups:
        direct.all_reduce(total, group, direct.MAX)
    for value in infinities.values():
        value.copy_(total[0])
    return infinities if infinities or not total[1] else {device: total[0]}
