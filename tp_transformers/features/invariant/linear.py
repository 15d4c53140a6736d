"""Linears and embeddings that have the bits of one process on any number of ranks; see `products`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ranks.collectives import apply_directly
from ...slices.layout import Layout, Ranks, Split
from ...strategies.base import TensorParallelLayer
from ...strategies.forward.attach import forward_of
from ...strategies.forward.communication import ShortForward
from ...strategies.linear import ColwiseParallel, RowwiseParallel, _WeightParallel
from ...strategies.local import to_local
from ...strategies.shards.shard import local_tensor
from ...strategies.signature import FEATURES, REPLICATED, Signature
from .products import InBlocks, InputGradient, gather_features


class _InvariantLinear(InBlocks, _WeightParallel):
    """Base of linears: the gradient of the input is computed by columns."""

    input_blocks = output_blocks = Ranks(1).split(0)
    """Splits of the input and output features in blocks of columns."""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; splits the features once."""
        bound = super().bind(module, size, **options)
        assert isinstance(bound, _InvariantLinear)
        bound.input_blocks = bound.split_part(bound.in_features, bound.ranks)
        bound.output_blocks = bound.split_part(bound.out_features, bound.ranks)
        return bound

    def check(self, module: nn.Module) -> None:
        """Reject a Conv1D whose width is no multiple of 4: MKL takes another kernel for 2 and 3 tokens."""
        super().check(module)
        if self.is_transposed and self.out_features % 4:
            raise ValueError(
                f"the bits of a {type(module).__name__} with {self.out_features} output features, no multiple of 4, "
                "are not those of its columns; load the model without tp_invariant"
            )

    def short_forward(self) -> ShortForward | None:
        return None

    def prepare_arguments(
        self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Communication.prepare_arguments`. Lets the local weight require a gradient where the parameter does.

        torch asks that, also under no_grad, when it chooses between one product of all rows and a batch of products.
        """
        params, replaced = module._parameters, forward_of(module).replaced
        if replaced is not None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for name in replaced[0].keys() & {"weight", "bias"}:
                param, own = params[name], replaced[0][name]
                if param is not None and own.requires_grad and not param.requires_grad and not param.is_inference():
                    params[name] = param.detach().requires_grad_()  # type: ignore[assignment]
        return args, keywords

    def detached(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input for the product, which records no gradient of it; `recorded` adds that."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        forward_of(module).notes["input"] = x
        return x.detach()

    def recorded(self, module: Any, y: Tensor, split: Split, mesh: DeviceMesh) -> Tensor:
        """The product, with the gradient of its input; `split` is that of the output features."""
        x = forward_of(module).notes.get("input")
        if x is None:
            return y
        weight, group = local_tensor(module.weight).detach(), mesh.get_group()
        settings = split, self.input_blocks, group, self.is_transposed
        return apply_directly(InputGradient)(y, x, weight, *settings)  # type: ignore[no-any-return]


class InvariantColwiseParallel(_InvariantLinear, ColwiseParallel):
    """`colwise` and `colwise_rep` with the bits of one process.

    The forward is the same. The backward gathers the gradient of the output and computes a block of columns of the
    gradient of the input on every rank, from all rows of the weight (all-to-all), instead of a sum.

        x ── [A | B] ── [xA | xB]
    """

    def gathered(self) -> Iterable[Split]:
        return self.output_split, self.input_blocks

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = to_local(inputs)[0]
        self.check_width(x, self.in_features)
        return (self.detached(module, x), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        y = self.recorded(module, outputs, self.output_split, mesh)
        return y if self.signature.leaves is FEATURES else gather_features(y, self.output_split, mesh.get_group())


class InvariantPackedColwiseParallel(InvariantColwiseParallel):
    """`packed_colwise` with the bits of one process: each part of a fused projection is split in blocks."""

    parts = 2


class InvariantRowwiseParallel(_InvariantLinear, RowwiseParallel):
    """In place of `rowwise` and `rowwise_rep`: shard the output features, and gather the input.

    A linear's `weight: (out/size, in)` and `bias: (out/size)`. Every rank computes some output features from all input
    features (all-gather before and after; backward: as of `invariant_colwise`).

        [x | y] ── xy ── [A | B] ── [xyA | xyB] ── xyAB
    """

    signature = Signature(inside=(REPLICATED, FEATURES))
    hidden: tuple[str, ...] = ()

    def gathered(self) -> Iterable[Split]:
        return self.input_split, self.input_blocks, self.output_blocks

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The output features: dim -2 of a weight, the last dim of a bias."""
        return -1 if self.is_transposed or ndim == 1 else -2

    def _layout(self, param_type: str, shape: Any, size: int) -> Layout | None:
        dim = self.split_dim(param_type, len(shape))
        assert dim is not None
        return Layout(dim % len(shape), self.output_blocks)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The output width of a Conv1D."""
        return {"nf": self.output_blocks.widths[rank]} if self.is_transposed else {}

    def check(self, module: nn.Module) -> None:
        """Accept linears."""
        super().check(module)
        if self.is_embedding:
            raise ValueError("it is an embedding; use invariant_embedding")

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = to_local(inputs)[0]
        if self.signature.takes is FEATURES:
            self.check_width(x, self.input_split.widths[self.rank])
            x = gather_features(x, self.input_split, mesh.get_group())
        self.check_width(x, self.in_features)
        return (self.detached(module, x), *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        y = self.recorded(module, outputs, self.output_blocks, mesh)
        return gather_features(y, self.output_blocks, mesh.get_group())


class InvariantPackedRowwiseParallel(InvariantRowwiseParallel):
    """In place of `packed_rowwise`: as `invariant_rowwise`, for the input that a packed projection leaves."""

    parts = 2


class InvariantEmbedding(InBlocks, RowwiseParallel):
    """`embedding_rowwise`, split in the blocks of the output embedding, which may be tied to it.

    A row comes from the rank that holds it; the others add zeros.
    """
