"""Embeddings and heads of another size, or that a user replaces: full on all ranks, then sharded by the plan."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...anatomy import features
from ...marks import untyped
from ...model.tensor_parallel_model import keep_state
from ...ranks.group import GROUP, TensorParallelGroup
from ...seams import Mixin, collective
from ...strategies import STRATEGY, full_tensor, shard_module, unsharded_like


class ResizableModel(Mixin):
    """Methods of a loaded model that change its embeddings."""

    tp_group: TensorParallelGroup

    @collective
    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set full embeddings, the same on all ranks, and shard them by the plan. Collective."""
        old = self.get_input_embeddings()
        super().set_input_embeddings(value)
        replace_embeddings(old, value, self.tp_group)

    @collective
    def set_output_embeddings(self, value: nn.Module) -> None:
        """Set a full head, the same on all ranks, and shard it by the plan. Collective."""
        old = self.get_output_embeddings()
        super().set_output_embeddings(value)
        replace_embeddings(old, value, self.tp_group)

    @collective
    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Resize full embeddings with transformers' method, then shard them again. Collective."""
        resize = partial(super().resize_token_embeddings, new_num_tokens, *args, **kwargs)
        if self.tp_group.device_mesh is None:
            return resize()
        return resize_embeddings(self, resize)


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
    shard_module(new, bound, group)
    keep_state(new)


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
