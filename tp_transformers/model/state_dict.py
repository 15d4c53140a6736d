"""State of a tensor-parallel model: state dicts, moves and casts, embeddings of another size.

Full tensors that come in (a state dict of one process, new embeddings) are sharded by the plan. Tensors that go out are
this rank's shards, under the names of the plain model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .. import seams
from ..anatomy.linears import features
from ..errors import UnsupportedError
from ..marks import untyped
from ..ranks.group import GROUP, TensorParallelGroup
from ..strategies import (
    SHARD,
    STRATEGY,
    ParamShard,
    TensorParallelLayer,
    full_tensor,
    local_tensor,
    shard_module,
    shard_of,
    unsharded_like,
)
from ..strategies.shards.pickled import check_pickled
from ..strategies.shards.tensors import is_sharded, laid_out, local_values


def keep_state(module: nn.Module) -> None:
    """Let `module` load full tensors, and keep its shards in deep copies; features add their hooks.

    The hooks are on the module, so that they also run under a wrapper of the model.
    """
    for feature in seams.features().values():
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
        check_pickled(value, param, shard, prefix + name)
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
        if shard.data_parallel is not None:
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


def replace_embeddings(old: nn.Module | None, new: nn.Module, group: TensorParallelGroup) -> None:
    """Shard `new` like `old`, which it replaces; it is full on all ranks, which take rank 0's values.

    A module of another kind stays as it is: it calls a sharded one, or every rank computes it in full.
    """
    strategy = STRATEGY.find(old)
    if strategy is None or hasattr(new, "tp_strategy") or hasattr(new, "tp_is_full") or features(new) is None:
        return
    if isinstance(new, nn.Linear):  # its tied weight may have been replaced
        new.out_features, new.in_features = new.weight.shape
    with group.agree():
        bound = strategy.bind(new, group.size, name=strategy.name, ranks=strategy.ranks, config=strategy.config)
        bound.check(new)
    split_module(new, bound, group)


def split_module(module: nn.Module, strategy: TensorParallelLayer, group: TensorParallelGroup) -> None:
    """Shard the full parameters of `module` and register its state-dict hooks; see `strategies.shard_module`."""
    shard_module(module, strategy, group)
    keep_state(module)


def resize_embeddings(model: PreTrainedModel, resize: Callable[[], object]) -> nn.Module:
    """Run transformers' `resize` on full embeddings, then shard them again. Collective.

    Every rank holds the full embeddings and the full head while it runs. All take rank 0's result. Returns the input
    embeddings.
    """
    group = GROUP.of(model)
    ways = [
        (model.get_input_embeddings, model.set_input_embeddings),
        (model.get_output_embeddings, model.set_output_embeddings),
    ]
    old = [
        (get, put, module, unsharded_like(module.weight).shape) for get, put in ways if (module := get()) is not None
    ]
    full_params: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for _, put, module, _ in old:
        put(_full_module(module, full_params))
    try:
        with group.agree():
            resize()
    except BaseException:
        for _, put, module, _ in old:
            put(module)
        raise
    for get, put, module, shape in old:
        new = get()
        new.__dict__.pop("tp_is_full", None)
        if new.weight.shape == shape:
            put(module)
        else:
            replace_embeddings(module, new, group)
    model.tie_weights()
    embeddings: nn.Module = model.get_input_embeddings()
    return embeddings


def _full_module(module: nn.Module, full_params: dict[int, nn.Parameter]) -> nn.Module:
    """Copy `module` as in one process: with full parameters and without communication."""
    full = copy.copy(module)
    for mark in ("tp_strategy", "tp_forwards", "forward", "_distribute_module_applied"):  # the last is torch's
        full.__dict__.pop(mark, None)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks", "_state_dict_hooks"):
        setattr(full, hooks, OrderedDict())
    full._parameters = dict(module._parameters)
    for name, param in module.named_parameters(recurse=False):
        if id(param) not in full_params:
            full_params[id(param)] = nn.Parameter(full_tensor(param), requires_grad=param.requires_grad)
        full._parameters[name] = full_params[id(param)]
    untyped(full).tp_is_full = True
    return full
