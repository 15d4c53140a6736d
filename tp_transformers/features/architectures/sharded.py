"""Norms, moments and products over sharded features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ...anatomy import epsilon, fold_layers, is_norm, is_rms_norm
from ...ranks.collectives import Group, copy_to_region, reduce_from_region
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import block_of, forward_of, parameter_of, wrap_forward
from ...strategies.forward.communication import Forwarder
from ...strategies.linear import LAST
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import FEATURES, LOCAL, Signature

if TYPE_CHECKING:
    from ...plans.binding import Binding


class ShardedNormParallel(TensorParallelLayer):
    """An RMS norm over sharded features, such as OLMo 2's over all query heads, a LayerNorm, or an L2 norm.

    `weight: (features/size)`. The mean square is over the full width (one all-reduce of a number per token; backward:
    all-reduce), and so is a LayerNorm's mean before it; features that several ranks hold (replicated KV heads) count
    once. An RMS norm gets fp32 at least and computes with the mean square of its own features; its output is then
    rescaled. A LayerNorm's output is computed here. An L2 norm has no weight, and the sum in place of the mean.

        [x | y] ── norm by mean(x² + y²) ── [x' | y']
    """

    signature = Signature(LOCAL, LOCAL)

    def check(self, module: nn.Module) -> None:
        """Accept a LayerNorm or an RMS norm with a weight, or an L2 norm without one."""
        is_layer_norm = isinstance(module, nn.LayerNorm) and len(self.shape) == 1
        if not (is_rms_norm(module, self.shape) or is_layer_norm or is_l2_norm(module)):
            raise ValueError(f"a {type(module).__name__} is no norm whose mean square could be summed")

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The features."""
        return -1

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The `normalized_shape` of torch's norms."""
        if not isinstance(module, nn.RMSNorm | nn.LayerNorm):
            return {}
        layout = self.layout("weight", self.shape, self.size)
        assert layout is not None
        return {"normalized_shape": layout.local_shape(self.shape, rank)}

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Keep the shards of weight and bias for a LayerNorm's output."""
        self.shards = shards

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, group = inputs[0], mesh.get_group()
        layout = self.layout("weight", self.shape, self.size) if self.shape else None
        split, count = (layout.split, layout.split.length) if layout is not None else (self.split, 1)
        shared = split.shared(self.rank) if split is not None else ()
        count *= len(shared[0].ranks) if shared else 1

        def mean(values: Tensor) -> Tensor:  # over the full width; of an L2 norm the sum
            return copy_to_region(reduce_from_region(values.sum(LAST, keepdim=True) / count, group), group)

        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(module, nn.LayerNorm):
            wide = wide - mean(wide)
        forward_of(module).notes["norm"] = (wide, mean(wide.square()), x.dtype)
        return (wide, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        wide, mean_square, dtype = forward_of(module).notes["norm"]
        eps = epsilon(module) or 0.0
        if not isinstance(module, nn.LayerNorm):
            own = wide.square().sum(LAST, keepdim=True) / (wide.shape[LAST] if self.shape else 1)
            return (outputs * torch.sqrt((own + eps) / (mean_square + eps))).to(dtype)
        local = {name: shard.view(parameter_of(module, name)) for name, shard in self.shards.items()}
        normed = wide * torch.rsqrt(mean_square + eps) * local["weight"]
        return (normed + local["bias"] if "bias" in local else normed).to(dtype)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        bound = super().bind(module, size, **options)
        assert isinstance(bound, ShardedNormParallel)
        bound.shape = next((tuple(param.shape) for param in module.parameters(recurse=False)), ())
        return bound

    shape: tuple[int, ...] = ()
    """Shape of the unsharded weight; () without one."""


def is_l2_norm(module: nn.Module) -> bool:
    """True if a module without parameters divides vectors by their length: it has an epsilon, and halves four ones."""
    if not is_norm(module) or epsilon(module) is None or list(module.parameters()):
        return False
    return bool(torch.allclose(module(torch.ones(4, device="cpu")), torch.full((4,), 0.5, device="cpu"), rtol=1e-4))


class ShardedMomentsParallel(TensorParallelLayer):
    """Statistics over sharded features, for a block with a threshold that depends on all features, such as an MLP with
    sparse activations: in the block, torch.mean and torch.std over the last dim are those of the full width, which is
    the rule's `widths` (one all-reduce of two numbers per token and rank; backward: all-reduce).

        [x | y] ── mean, std of xy ── [x' | y']
    """

    signature = Signature(inside=(LOCAL, LOCAL))

    def check(self, module: nn.Module) -> None:
        """The rule must declare exactly one width."""
        if len(self.widths) != 1:
            raise ValueError("sharded_moments needs exactly one sharded width: {widths: intermediate_size}")

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Compute moments over all ranks in the forward."""
        (width,) = self.widths.values()
        counts, group = self.ranks.counts(width), mesh.get_group()
        _run_in(lambda mod: _Moments(counts, self.rank, group), module)


class _Moments(TorchFunctionMode):
    """Computes torch.mean and torch.std over the last dim over the features of all ranks.

    Args:
        counts: number of features of every rank, from `Ranks.counts`.
    """

    def __init__(self, counts: Sequence[int], rank: int, group: Group) -> None:
        super().__init__()
        self.counts, self.rank, self.group = counts, rank, group
        self.last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        """A tensor, the mean of its features and the sum of their squared distances from the mean, over all ranks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.mean, torch.std) or kwargs.get("dim") != LAST or not kwargs.get("keepdim"):
            return func(*args, **kwargs)
        x = args[0]
        if self.last is None or self.last[0] is not x:
            self.last = x, self._moments(x)
        mean, squares = self.last[1]
        free = kwargs.get("correction", int(kwargs.get("unbiased", True)))
        return (mean if func is torch.mean else torch.sqrt(squares / (sum(self.counts) - free))).to(x.dtype)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size, length = len(self.counts), sum(self.counts)
        counts = torch.cat([wide.new_full((1,), count) for count in self.counts])  # a copy from the host would wait
        own = wide.mean(LAST, keepdim=True)
        both = torch.stack((own, (wide - own).square().sum(LAST, keepdim=True)))
        slots = pad(both, (self.rank, size - 1 - self.rank))
        means, squares = copy_to_region(reduce_from_region(slots, self.group), self.group)
        mean = (means * counts).sum(LAST, keepdim=True) / length
        return mean, (squares + counts * (means - mean).square()).sum(LAST, keepdim=True)


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
        _run_in(lambda mod: _Products(mod, dims, group), module)


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


def _run_in(mode: Callable[[nn.Module], TorchFunctionMode], module: nn.Module) -> None:
    """Run the forward of `module` in `mode(module)`."""

    def around(call: Forwarder) -> Forwarder:
        def forward(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with mode(mod):
                return call(mod, *args, **kwargs)

        return forward

    wrap_forward(module, around)


def compared_features(bound: Binding) -> Iterator[str]:
    """Faults: gates of Gemma 3n, which zeroes features below a threshold that is computed from all of a token."""
    for name, strategy in bound.module_strategies.items() if bound.size > 1 else ():
        block = name.rpartition(".")[0]
        pattern = getattr(strategy.config, "activation_sparsity_pattern", None)
        is_sparse = any(pattern) if isinstance(pattern, list | tuple) else bool(pattern)
        is_cut = strategy.signature.leaves is FEATURES and not bound.signature(block).computes_locally
        if is_sparse and is_cut and name.endswith("mlp.gate_proj"):
            yield (
                f"{fold_layers(name)}: with activation_sparsity_pattern its features are compared with each other; "
                f"add {fold_layers(block)}: {{strategy: sharded_moments, widths: intermediate_size}}"
            )
