"""Gradient clipping by the norm of the gradients of all shards: `clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..ranks import direct
from ..slices.layout import joined
from ..strategies import ParamShard, finish_gradient, full_tensor, local_tensor, shard_of
from ..torch_api import foreach_norm, group_tensors


@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` by the norm of the full model's gradients; collective.

    Every element of a gradient counts once: values that several ranks hold (norms, replicated KV heads) on the lowest
    of them, tied parameters once, shards of FSDP on every rank. One all-reduce of one number over the `tp` axis, and
    one over the copies if gradients are sharded over them. Norms are computed in fp32 at least. With `tp_invariant`,
    gradients are gathered one after another, and the norm has the bits of torch's in one process.

    Args:
        model_or_parameters: the model, or some of its parameters; those without a gradient are left out.
        max_norm: the largest norm; if it is exceeded, all gradients are scaled by one factor, in place.
        norm_type: the p of the norm; `float("inf")` for the largest magnitude.
        error_if_nonfinite: whether to raise RuntimeError, on all ranks, if the norm is NaN or infinite.
        foreach: whether to compute many tensors at a time; None: where possible.

    Returns:
        The norm before clipping, the same on all ranks.
    """
    if isinstance(model_or_parameters, nn.Module):
        parameters: Iterable[Tensor] = model_or_parameters.parameters()
    else:
        parameters = [model_or_parameters] if isinstance(model_or_parameters, Tensor) else model_or_parameters
    params = list({id(param): param for param in parameters}.values())
    shards = [shard for shard in map(shard_of, params) if shard is not None]
    if not shards:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm_type = float(norm_type)
    grads = [finish_gradient(param) for param in params]
    if any(shard.keeps_order for shard in shards):
        norm = _norm_of_full(params, grads, norm_type, shards[0].group.device)
    else:
        norm = _norm_of_shards(params, grads, norm_type, shards, foreach)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {norm.item()}, by which they cannot be clipped; with "
            "error_if_nonfinite=False they would be scaled by it"
        )
    local = [local_tensor(grad) for grad in grads if grad is not None]
    nn.utils.clip_grads_with_norm_(map(with_gradient, local), max_norm, norm, foreach)
    return norm


def _norm_of_shards(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    norm_type: float,
    shards: Sequence[ParamShard],
    foreach: bool | None,
) -> Tensor:
    """The norm of all gradients from those of the shards, which are added up over the ranks."""
    rank, process_group, device = shards[0].group.rank, shards[0].group.process_group, shards[0].group.device
    dtype = reduce(torch.promote_types, (param.dtype for param in params), torch.float32)
    copies = next((shard.resharded_over for shard in shards if shard.is_over_copies), None)
    # 1. Gradients that count on this rank: those that are also sharded over the copies, and those that are not.
    counted: dict[bool, list[Tensor]] = {False: [], True: []}
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            shard = shard_of(param)
            over_copies = shard is not None and shard.is_over_copies
            counted[over_copies].extend(_counted(param, local_tensor(grad), rank))
    # 2. The p-th powers of their norms, which add up.
    is_max = norm_type == float("inf")
    reduction = direct.MAX if is_max else direct.SUM
    unsharded, sharded = (_power(counted[over], norm_type, device, dtype, foreach) for over in (False, True))
    direct.all_reduce(sharded, copies, reduction)
    total = torch.maximum(unsharded, sharded) if is_max else unsharded + sharded
    direct.all_reduce(total, process_group, reduction)
    return total if is_max else total ** (1 / norm_type)


def _norm_of_full(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], norm_type: float, device: torch.device
) -> Tensor:
    """The norm as torch computes it for a model in one process, bit by bit: of one gathered gradient after another.

    Torch adds up the norms of one dtype after those of another.
    """
    norms: list[Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        full = full_tensor(param, grad)
        if full is not None:
            norms += foreach_norm([full], norm_type)
    by_dtype = [norm.to(device) for (group,), _ in group_tensors([norms]).values() for norm in group]
    total: Tensor = torch.linalg.vector_norm(torch.stack(by_dtype), norm_type)
    return total


def _counted(param: Tensor, grad: Tensor, rank: int) -> Iterator[Tensor]:
    """The slices of a local gradient that count on this rank: values that no lower rank also holds."""
    shard = shard_of(param)
    if shard is None and isinstance(param, DTensor) and any(isinstance(place, Shard) for place in param.placements):
        yield grad
        return
    if shard is None or shard.layout is None:  # a parameter that was added to the model, or a replicated one
        over_tp = shard is not None and shard.resharded_over is not None and not shard.is_over_copies
        if rank == 0 or over_tp:
            yield grad
        return
    dim = shard.layout.dim
    start, stop = shard.rows if dim == 0 else (0, shard.local_shape[dim])
    own = (entry for entry in shard.layout.split.shard_ranges if entry.rank == rank)
    for first, last in joined((entry.local, entry.local + entry.length) for entry in own):
        first, last = max(first, start), min(last, stop)
        if first < last:
            yield grad.narrow(dim, first - start, last - first)


def _power(
    tensors: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype, foreach: bool | None
) -> Tensor:
    """The p-th power of the norm of `tensors`, in `dtype`; the norm itself for infinity."""
    zero = torch.zeros(1, dtype=dtype, device=device)  # a rank may hold nothing that counts
    norms: list[Tensor] = []
    for (same_kind,), _ in group_tensors([[zero, *(tensor for tensor in tensors if tensor.numel())]]).values():
        if foreach is False:
            kind_norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in same_kind]
        else:
            kind_norms = foreach_norm(same_kind, norm_type, dtype=dtype)
        norms += [norm.to(device) for norm in kind_norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm if norm_type == float("inf") else norm.pow(norm_type)


def with_gradient(grad: Tensor) -> Tensor:
    """A tensor with the gradient `grad`."""
    holder = grad.detach()
    holder.grad = grad
    return holder
