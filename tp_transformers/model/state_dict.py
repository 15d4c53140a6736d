"""State of a tensor-parallel model: state dicts, moves and casts.

Full tensors that come in, as in a state dict of one process, are sharded by the plan. Tensors that go out are this
rank's shards, under the names of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedError
from ..marks import untyped
from ..ranks.group import TensorParallelGroup
from ..seams import features
from ..strategies import (
    SHARD,
    ParamShard,
    local_tensor,
    shard_of,
)
from ..strategies.shards.tensors import is_sharded, laid_out, local_values


def keep_state(module: nn.Module) -> None:
    """Let `module` load full tensors, and keep its shards in deep copies; features add their hooks.

    The hooks are on the module, so that they also run under a wrapper of the model.
    """
    for feature in features().values():
        feature.sharded(module)
    module.register_load_state_dict_pre_hook(_load_own_shards)
    untyped(module).tp_copies = _Copies(module)


class _Copies:
    """On a module: puts the shard marks of its parameters on their deep copies; torch's copies drop them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        for param in self.module._parameters.values():
            if id(param) in memo and hasattr(param, SHARD.name):
                SHARD.put(memo[id(param)], SHARD.of(param))
        return _Copies(memo.get(id(self.module), self.module))


def _load_own_shards(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Replace full tensors in a state dict that is loaded by this rank's shards."""
    for name, param in module._parameters.items():
        shard, value = shard_of(param), state.get(prefix + name)
        if param is None or shard is None or not isinstance(value, Tensor):
            continue
        local = _own_shard(value, shard, param)
        if local is None:
            kind = f"a DTensor of {value.placements}" if isinstance(value, DTensor) else "a tensor"
            errors.append(
                f"size mismatch for {prefix}{name}: got {kind} of shape {tuple(value.shape)}, expected the full "
                f"{tuple(shard.shape)}, or this rank's shard of it."
            )
            state[prefix + name] = param
            continue
        if metadata.get("assign_to_params_buffers"):
            local = local.contiguous() if local.shape == value.shape else local.clone()
        if shard.resharded_over is not None:
            state[prefix + name] = nn.Parameter(laid_out(local, param), requires_grad=param.requires_grad)
        else:
            state[prefix + name] = shard.wrap(local, requires_grad=param.requires_grad)


def _own_shard(value: Tensor, shard: ParamShard, param: Tensor) -> Tensor | None:
    """This rank's shard of `value`: a slice of a full value, or a value that has the parameter's layout; else None."""
    if (
        isinstance(value, DTensor)
        and shard.placement is None
        and all(place.is_replicate() for place in value.placements)
    ):
        value = local_tensor(value)  # full on every rank
    if isinstance(value, DTensor):
        placements = param.placements if isinstance(param, DTensor) else (shard.placement,)
        return local_tensor(value) if value.placements == placements else None
    if is_sharded(value):
        local = local_values(value)
        value = local if value.tp_shard.layout == shard.layout else value.tp_shard.full(local)
    value = value.detach()
    if value.shape == shard.shape:
        return shard.own(value)
    return value if value.shape == local_tensor(param).shape else None


@contextmanager
def keep_shards(module: nn.Module) -> Iterator[None]:
    """Put the shard marks back on parameters that the block recreates: a DTensor of another dtype is a new one."""
    shards = {
        name: SHARD.of(param)
        for name, param in module.named_parameters(remove_duplicate=False)
        if hasattr(param, SHARD.name)
    }
    yield
    for name, param in module.named_parameters(remove_duplicate=False):
        if name in shards:
            SHARD.put(param, shards[name])


def check_device(move: Callable[[Tensor], Tensor], group: TensorParallelGroup) -> None:
    """Raise UnsupportedError if `move`, such as a cast or a copy to a GPU, leaves the device of the mesh."""
    device = move(torch.empty(0, device=group.device)).device
    if device != group.device:
        raise UnsupportedError(
            "the device of a tensor-parallel model",
            got=str(device),
            expected=f"{group.device}, which its mesh is made of",
            fix="Load it where it is to run; to have it elsewhere, save it with save_pretrained and load that.",
        )
