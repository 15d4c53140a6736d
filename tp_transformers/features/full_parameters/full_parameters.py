"""Full parameters of a tensor-parallel model for a while, in place of the shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedError
from ...marks import Mark
from ...ranks import direct
from ...strategies.shards.shard import finish_gradient, full_tensor, local_tensor, shard_of
from ...strategies.shards.tensors import is_sharded, know, laid_out
from .values import write

Place = tuple[nn.Module, str, nn.Parameter]
"""(module, name of a parameter in the module, the parameter)."""
FULL: Mark[nn.Parameter] = Mark("tp_full")
"""On a parameter, the full parameter that replaces it in `full_parameters`: the same object in every block."""
IS_OPEN: Mark[bool] = Mark("tp_is_open")
"""On a full parameter, True in a `full_parameters` block, and False after the block, when the parameter is empty."""


@contextmanager
def full_parameters(
    model: nn.Module, writeback: bool = True, *, parameters: Iterable[Tensor] | None = None
) -> Iterator[None]:
    """Replace the parameters of `model` by full, ordinary ones in the block. Collective: all ranks run the same block.

    After the block each rank takes its shard of the full parameters, with the values of rank 0, and of their gradients.
    If the block raises on any rank, all ranks raise, and parameters and gradients stay as they were before the block. A
    block with collectives, such as forwards, may raise on one rank alone only within `fail_together`.

    In the block `param.grad` is the full gradient, and forwards and backwards compute as before. The full parameters
    are the same objects in every block: an optimizer that was made in one block steps in the next. States of such an
    optimizer are full on every rank. A block takes the memory of all full parameters, and of all full gradients, beside
    the shards.

    Args:
        writeback: False to discard what the block writes to parameters and gradients.
        parameters: the parameters to replace; None for all. The others stay shards.

    Raises UnsupportedError for packed weights, for a forward under FSDP, and if the block puts a parameter of another
    shape in place of a sharded one.
    """
    chosen = set(map(id, model.parameters() if parameters is None else parameters))
    places = [place for place in _places(model) if id(place[2]) in chosen]
    params = list(dict.fromkeys(param for _, _, param in places))
    shards = [shard for param in params if (shard := shard_of(param)) is not None]
    is_fsdp, kept = any(shard.resharded_over for shard in shards), places
    hooks = [module.register_forward_pre_hook(_refuse, prepend=True) for module in model.modules() if is_fsdp]
    try:
        for param in params:
            _open(param)
        for module, name, param in places:
            module._parameters[name] = FULL.of(param)
        with shards[0].group.agree() if shards else nullcontext():
            yield
            written = _written(model, places)
        if writeback:
            kept = _take_shards(written)
    finally:
        for module, name, param in kept:
            module._parameters[name] = param
        for param in params:
            _close(FULL.find(param))
        for hook in hooks:
            hook.remove()


def _places(model: nn.Module) -> Iterator[Place]:
    """All places of parameters; a tied parameter has several."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield module, name, param


@torch.no_grad()
def _open(param: nn.Parameter) -> None:
    """Gather the full parameter and its full gradient."""
    if shard_of(param) is None and isinstance(param, DTensor):
        raise UnsupportedError(
            f"full_parameters with a parameter of {tuple(param.shape)}",
            got="a DTensor that no plan has sharded",
            expected="shards of a tensor-parallel model",
            fix="Leave it out of `parameters`.",
        )
    full = FULL.find(param)
    if full is None:
        FULL.put(param, full := nn.Parameter(torch.empty(0, dtype=param.dtype, device=param.device)))
    full.data = full_tensor(param)
    full.requires_grad_(param.requires_grad).grad = full_tensor(param, finish_gradient(param))
    IS_OPEN.put(full, True)


def _close(full: nn.Parameter | None) -> None:
    """Release the values of a full parameter; None if the block has failed before it was made."""
    if full is not None:
        full.data, full.grad = full.new_empty(0), None
        IS_OPEN.put(full, False)


def _written(model: nn.Module, places: Sequence[Place]) -> list[tuple[Place, nn.Parameter]]:
    """(place and written value, the parameter whose shard it becomes), also where the block has put it elsewhere.

    Raises UnsupportedError for a value of a shape that the layout of the shard does not fit.
    """
    own = {FULL.of(param): param for _, _, param in places}
    before = {(module, name): param for module, name, param in places}
    found = [(place, own.get(place[2], before.get(place[:2]))) for place in _places(model)]
    for (module, name, value), param in found:
        shard = shard_of(param)
        if shard is None or value.shape == shard.shape:
            continue
        dim = None if shard.layout is None else shard.layout.dim
        is_like = value.ndim == len(shard.shape) and (dim is None or value.shape[dim] == shard.shape[dim])
        if not is_like or shard.resharded_over is not None:
            raise UnsupportedError(
                f"{name} of a {type(module).__name__} after full_parameters",
                got=f"shape {tuple(value.shape)}",
                expected=f"shape {tuple(shard.shape)}, by which it is sharded",
                fix="Resize embeddings with model.resize_token_embeddings; load another checkpoint for other widths.",
            )
    return [(place, param) for place, param in found if param is not None]


@torch.no_grad()
def _take_shards(written: Sequence[tuple[Place, nn.Parameter]]) -> list[Place]:
    """Take this rank's shards of the written values; two values of one parameter become two parameters."""
    taken: dict[Tensor, nn.Parameter] = {}
    for (_, _, value), param in written:
        if value not in taken:
            is_new = shard_of(param) is None and value is not FULL.of(param)  # and not sharded, as before
            in_place = not any(param is each for each in taken.values())
            taken[value] = value if is_new else _take_shard(value, param, in_place=in_place)
    return [(module, name, taken[value]) for (module, name, value), _ in written]


def _take_shard(value: nn.Parameter, param: nn.Parameter, *, in_place: bool) -> nn.Parameter:
    """`param` with this rank's shard of `value` and of its gradient; a new parameter for another shape."""
    shard, full, grad = shard_of(param), value.detach().contiguous(), value.grad
    for process_group in () if shard is None else (shard.group.process_group, shard.resharded_over):
        if process_group is not None:
            direct.broadcast(full, process_group, 0)
    if shard is not None and not (in_place and value.shape == shard.shape):
        shard = dataclasses.replace(shard, shape=value.shape)
        param = shard.wrap(shard.own(full).clone(), requires_grad=value.requires_grad)
    elif is_sharded(param):
        write(param, full)
    else:
        local_tensor(param).copy_(full if shard is None else shard.own(full))
    if grad is not None:
        grad = grad if shard is None else shard.own(grad.detach()).clone()
        grad = know(grad, param) if is_sharded(param) else laid_out(grad, param)
    param.requires_grad_(value.requires_grad).grad = grad
    return param


def _refuse(module: nn.Module, *_: object) -> None:
    raise UnsupportedError(
        f"a forward of a {type(module).__name__} in full_parameters",
        got="a model that FSDP shards over its copies",
        expected='a model without data_parallel(mode="shard")',
        fix="Call the model after the block.",
    )
