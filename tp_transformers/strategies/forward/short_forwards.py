"""The forward of a linear with a simple strategy, in as few steps as possible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from ...ranks import direct
from ..shards.shard import ParamShard
from ..shards.tensors import HAS_LOCAL
from .block import Block
from .communication import Communication, Forwarder, ShortForward


def forward_of_linear(
    general: Forwarder, short: ShortForward, strategy: Communication, views: Mapping[str, ParamShard], mesh: DeviceMesh
) -> Forwarder:
    """The forward of an `nn.Linear`, which equals `after(linear(before(input)))`; `general` is for DTensors.

    In inference it is `linear` on local tensors and, for a row-parallel one, an in-place all-reduce of its output. All
    other cases (gradients, a sum of gradients over ranks, a gather) call `longer`.
    """
    of_bias, hides_bias = views.get("bias"), "bias" in strategy.hidden
    of_weight, joins = views.get("weight"), {name for name, shard in views.items() if not shard.routes_gradient}
    joins_weight, joins_bias = "weight" in joins, "bias" in joins
    copies_input, prepares_input = short.input == "copied", short.input == "before"
    keeps_output, sums = short.output == "as it is", short.output == "summed"

    def longer(module: Any, input: Tensor) -> Any:
        if type(input) is not Tensor:
            return general(module, input)
        strategy: Communication = module.tp_strategy
        parameters = module._parameters
        try:
            weight, bias = parameters["weight"], None if hides_bias else parameters["bias"]
        except KeyError:  # computed from others, as by torch.nn.utils.parametrize
            return general(module, input)
        block = strategy.block
        if prepares_input:
            (x,) = strategy.before(module, (input,), mesh)
        elif copies_input and torch.is_grad_enabled() and input.requires_grad:
            x = strategy.copy(input, mesh) if block is None else block.copy(input, strategy, mesh)
        else:
            x = input
        weight = _view(weight, of_weight, block if joins_weight else None)
        bias = None if bias is None else _view(bias, of_bias, block if joins_bias else None)
        try:
            output = linear(x, weight, bias)
        except RuntimeError:
            strategy.before(module, (input,), mesh)  # raises PlanError if the input has another width
            raise
        return output if keeps_output else strategy.after(module, output, mesh)

    is_quick = not prepares_input and (keeps_output or sums) and not (views.keys() - joins)
    if not is_quick:
        return wraps(nn.Linear.forward)(longer)

    @wraps(nn.Linear.forward)
    def forward(module: Any, input: Tensor) -> Any:
        if torch.is_grad_enabled() or type(input) is not Tensor:
            return longer(module, input)
        parameters = module._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            return longer(module, input)
        if isinstance(weight, HAS_LOCAL):
            weight = weight._local_tensor
        elif of_weight is not None:
            return longer(module, input)  # it may be an unsharded tensor
        if isinstance(bias, HAS_LOCAL):
            bias = bias._local_tensor
        try:
            output = linear(input, weight, None if sums else bias)
        except RuntimeError:
            return longer(module, input)  # raises PlanError if the input has another width
        if sums:
            direct.all_reduce(output, module.tp_strategy.group_of(mesh))
            return output if bias is None else output + bias
        return output

    return forward


def _view(param: Tensor, shard: ParamShard | None, block: Block | None) -> Tensor:
    """The local tensor of a parameter, from the autograd node of its `block` if there is one."""
    if shard is None:
        return param
    return shard.view(param) if block is None or not isinstance(param, HAS_LOCAL) else block.local(param)
