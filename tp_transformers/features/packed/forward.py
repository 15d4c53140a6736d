"""The forward of a module with packed weights.

The module's parameter is a placeholder on the meta device, with the shape, dtype and shard of the weight. During the
forward, a `PackedTensor` replaces it. torch.compile leaves these forwards out of its graphs.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...marks import untyped
from ...ranks import direct
from ...ranks.group import TensorParallelGroup
from ...strategies import SHARD
from ...strategies.forward.attach import LocalConfig, wrap_forward
from ...strategies.forward.communication import Communication, Forwarder, ShortForward
from ...strategies.shards.tensors import HAS_LOCAL
from .placeholder import HeldWeights, without_values
from .tensor import PackedTensor
from .weight import PACKED, HeldWeight, PackedWeight, with_products


def hold_packed(module: nn.Module, name: str, weight: HeldWeight) -> HeldWeight:
    """Compute with a packed weight in the place of the parameter `name` of a module, which is on the meta device.

    Returns the weight in the layout that the module computes with.
    """
    shard = SHARD.of(module._parameters[name])
    placeholder = shard.wrap(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    untyped(placeholder)._is_hf_initialized = True
    module._parameters[name] = without_values(placeholder)
    packed = PACKED.find(module)
    if packed is None:
        PACKED.put(module, packed := HeldWeights())
        short = inference_forward(module)
        wrap_forward(module, _with_weights)
        if short is not None:
            wrap_forward(module, partial(_multiplied, shard.group if short.output == "summed" else None))
    packed[name] = with_products(weight) if isinstance(weight, PackedWeight) else weight
    return packed[name]


def _multiplied(group: TensorParallelGroup | None, call: Forwarder) -> Forwarder:
    """Wrap a linear's forward: in inference, the product with its packed weight in as few steps as possible.

    `call` is for all other cases; its result is the same. `group`: the ranks that sum the outputs; None for no sum.
    """

    @wraps(nn.Linear.forward)
    def forward(module: Any, input: Tensor) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(input) is not Tensor:
            return call(module, input)
        weight, bias = PACKED.of(module)["weight"], module._parameters["bias"]
        rows, columns = weight.shape
        is_cast = input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type)
        if is_cast or input.shape[-1] != columns:
            return call(module, input)
        output = weight.linear(input.view(-1, columns) if input.is_contiguous() else input.reshape(-1, columns))
        if group is not None:
            direct.all_reduce(output := output.contiguous(), group.process_group)
        output = output.view(*input.shape[:-1], rows)
        bias = bias._local_tensor if isinstance(bias, HAS_LOCAL) else bias
        return output if bias is None else output + bias

    return forward


def _with_weights(call: Forwarder) -> Forwarder:
    """Wrap a forward so that the module has its packed weights while it runs."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        packed = PACKED.of(module)
        placeholders = {name: module._parameters[name] for name in packed}
        config = module.__dict__.get("config")
        try:
            for name, weight in packed.items():
                module._parameters[name] = PackedTensor(weight)  # type: ignore[assignment]
            if hasattr(config, "_experts_implementation"):  # others read all experts
                module.__dict__["config"] = LocalConfig(config, _experts_implementation="eager")
            return call(module, *args, **kwargs)
        finally:
            module._parameters.update(placeholders)
            if config is not None:
                module.__dict__["config"] = config

    untraced: Forwarder = torch.compiler.disable(forward)
    return untraced


def inference_forward(module: nn.Module) -> ShortForward | None:
    """The short forward of a linear that keeps its input in inference, and at most sums its output; else None."""
    strategy: Communication | None = vars(module).get("tp_strategy")
    if strategy is None:
        is_plain = type(module) is nn.Linear and "forward" not in vars(module)
        return ShortForward("as it is", "as it is") if is_plain else None
    short = strategy.short_forward() if strategy.asks_block else None
    return short if short and short.input != "before" and short.output != "after" else None
