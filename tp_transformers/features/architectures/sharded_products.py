"""Attention that multiplies with its own parameters by torch.einsum instead of calling projections, as XLNet's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ...ranks.collectives import Group, copy_to_region, reduce_from_region
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import block_of, wrap_forward
from ...strategies.forward.communication import Forwarder
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import LOCAL, Signature


class ShardedProductsParallel(TensorParallelLayer):
    """Communication around torch.einsum with the module's own parameters, which are sharded by rules of their own.

    The equation determines it: a factor without the index of the sharded dim is copied (backward: all-reduce), and a
    result without that index is summed over the ranks (all-reduce; backward: identity).

        ibh,hnd->ibnd    x ──f── [A | B] ── [xA | xB]
        ibnd,hnd->ibh    [x | y] ── [A / B] ── xA + yB ──g── replicated
    """

    signature = Signature(inside=(LOCAL, LOCAL))

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Communicate around the products of the forward."""
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
    """Communicates around torch.einsum with parameters of `module` that are sharded along `dims`.

    From a product with a sharded result to one with a replicated result, each rank draws its own random numbers.
    """

    def __init__(self, module: nn.Module, dims: Mapping[str, int], group: Group) -> None:
        super().__init__()
        self.dims = {id(module._parameters[name]): dim for name, dim in dims.items()}
        self.guards = block_of(module).guards
        self.group = group
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Each factor and its copy, by the factor's id: queries, keys and values are computed from the same states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sharded = [i for i, factor in enumerate(args[1:]) if id(factor) in self.dims] if func is torch.einsum else []
        if not sharded:
            return func(*args, **(kwargs or {}))
        factors, result = args[0].replace(" ", "").split("->")
        terms, (position,) = factors.split(","), sharded
        index = terms[position][self.dims[id(args[1 + position])]]
        operands = [
            factor if index in term else self._copied(factor) for term, factor in zip(terms, args[1:], strict=True)
        ]
        product = func(args[0], *operands)
        for guard in self.guards:
            guard.enter() if index in result else guard.leave()
        return product if index in result else reduce_from_region(product, self.group)

    def _copied(self, factor: Tensor) -> Tensor:
        if id(factor) not in self.copies:
            self.copies[id(factor)] = factor, copy_to_region(factor, self.group)
        return self.copies[id(factor)][1]
