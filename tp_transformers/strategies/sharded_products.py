"""Attention that multiplies with parameters of its own, by torch.einsum, instead of calling projections, as XLNet's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ..ranks.collectives import Group, copy_to_region, reduce_from_region
from .base import TensorParallelLayer
from .forward.attach import block_of, wrap_forward
from .forward.short_forwards import Forwarder
from .shards.shard import ParamShard
from .signature import LOCAL, Signature


class ShardedProductsParallel(TensorParallelLayer):
    """Around a module with parameters of its own that are factors of products and cut by rules of their own.

    The equation of a product says the rest: a factor without the dim that is cut is copied (backward: all-reduce), and
    a product without it is summed over the ranks (all-reduce; backward: identity).

        ibh,hnd->ibnd    x ──f── [A | B] ── [xA | xB]
        ibnd,hnd->ibh    [x | y] ── [A / B] ── xA + yB ──g── whole
    """

    signature = Signature(inside=(LOCAL, LOCAL))

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Let the forward multiply with this rank's parts."""
        dims = {name: shard.layout.dim for name, shard in shards.items() if shard.layout is not None}
        group = mesh.get_group()
        block_of(module)

        def around(call: Forwarder) -> Forwarder:
            def forward(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
                with _Products(mod, dims, group):
                    return call(mod, *args, **kwargs)

            return forward

        wrap_forward(module, around)


class _Products(TorchFunctionMode):
    """Communicates around torch.einsum with parameters of `module` that are cut along `dims`.

    From a product with a cut result to one with a full result, a rank draws random numbers of its own.
    """

    def __init__(self, module: nn.Module, dims: Mapping[str, int], group: Group) -> None:
        super().__init__()
        self.dims = {id(module._parameters[name]): dim for name, dim in dims.items()}
        self.guards = block_of(module).guards
        self.group = group
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a factor, it and its copy: queries, keys and values are made of the same states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cut = [at for at, factor in enumerate(args[1:]) if id(factor) in self.dims] if func is torch.einsum else []
        if not cut:
            return func(*args, **(kwargs or {}))
        factors, result = args[0].replace(" ", "").split("->")
        terms, (at,) = factors.split(","), cut
        index = terms[at][self.dims[id(args[1 + at])]]
        given = [
            factor if index in term else self._copied(factor) for term, factor in zip(terms, args[1:], strict=True)
        ]
        product = func(args[0], *given)
        for guard in self.guards:
            guard.enter() if index in result else guard.leave()
        return product if index in result else reduce_from_region(product, self.group)

    def _copied(self, factor: Tensor) -> Tensor:
        if id(factor) not in self.copies:
            self.copies[id(factor)] = factor, copy_to_region(factor, self.group)
        return self.copies[id(factor)][1]
