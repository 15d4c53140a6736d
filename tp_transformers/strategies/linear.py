"""Column- and row-parallel layers (Megatron-LM, Shoeybi et al. 2019, section 3), for linears and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..anatomy.linears import features, is_transposed
from ..errors import PlanError, describe
from ..marks import untyped
from ..ranks.collectives import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from ..slices.layout import Layout, Split, even
from .attach import forward_of
from .base import Placements, TensorParallelLayer, as_sharded, only
from .shard import take

LAST = -1
"""The feature dim of activations: (..., features)."""


class _WeightParallel(TensorParallelLayer):
    """What column- and row-parallel layers share: they cut a module's weight along its input or output features."""

    is_transposed = False
    """Whether the weight is (in, out), as that of GPT-2's Conv1D."""
    in_features = 0
    """Input features of the module, whole: the rows of an embedding."""
    out_features = 0
    """Output features of the module, whole."""

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; the module's features are read here, once."""
        bound = super().bind(module, size, **options)
        assert isinstance(bound, _WeightParallel)
        bound.is_transposed = is_transposed(module)
        bound.in_features, bound.out_features = features(module) or (0, 0)
        return bound

    def check(self, module: nn.Module) -> None:
        """They cut linears, whose weight is (out_features, in_features), Conv1D, and embeddings without parts."""
        if features(module) is None:
            raise ValueError(f"a {type(module).__name__} is no linear or embedding, which colwise and rowwise cut")
        if self.parts is not None and self.is_embedding:
            raise ValueError("an embedding has no packed parts")

    def check_width(self, x: Tensor, expected: int) -> None:
        """Raise PlanError, before anything is communicated, where the input is not `expected` features wide."""
        # No vote: widths follow from plan and module, alike on all ranks. A fault on some ranks alone takes two uneven
        # cuts of one width that agree in part (3 3 2 2 and 3 3 3 1); `plans/checks/widths.py` refuses them in a block.
        if x.shape[LAST] != expected:
            raise PlanError(
                describe(
                    self.name,
                    got=f"an input of {x.shape[LAST]} features",
                    expected=str(expected),
                    fix="The plan's rules for it and for what comes before it do not fit together: one side is sharded "
                    "where the other expects the whole.",
                )
            )


class ColwiseParallel(_WeightParallel):
    """Cut the output features.

    A linear's `weight: (out/size, in)` and `bias: (out/size)`; an embedding's `weight: (vocab, hidden/size)`; dim -2 of
    a parameter that a plan names itself, such as experts of (experts, out, in).
    Input whole (backward: all-reduce); output `(..., out/size)`, or whole with `output_layouts=Replicate()`
    (all-gather; backward: own slice).

        x ──f── [A | B] ── [xA | xB]
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        use_dtensor: bool = True,
    ) -> None:
        """`input_layouts`: Replicate() (default) or Shard(-1). `output_layouts`: Shard(-1) (default) or Replicate()."""
        super().__init__(
            input_layouts=(input_layouts or Replicate(),),
            output_layouts=output_layouts or Shard(LAST),
            desired_input_layouts=(Replicate(),),
            use_local_output=use_local_output,
            use_dtensor=use_dtensor,
        )

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The output features: dim -2 of a weight, the last dim of a bias; the hidden dim of an embedding."""
        is_bias = ndim == (2 if self.holds_experts else 1)
        return -1 if self.is_embedding or self.is_transposed or is_bias else -2

    @property
    def output_split(self) -> Split:
        """Which output features each rank computes."""
        return self.cut(self.out_features, self.size)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The width that a Conv1D gives its output."""
        return {"nf": self.output_split.widths[rank]} if self.is_transposed else {}

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, strategy = inputs[0], mod.tp_strategy
        assert isinstance(strategy, ColwiseParallel)
        if isinstance(x, DTensor):
            x = x.redistribute(device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        else:
            if isinstance(only(input_layouts), Shard):
                widths = even(strategy.in_features, strategy.size).widths
                x = gather_from_region(x, widths, device_mesh.get_group())
            elif not strategy.is_embedding:
                strategy.check_width(x, strategy.in_features)
            x = copy_to_region(x, device_mesh.get_group())
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        strategy: ColwiseParallel = untyped(mod).tp_strategy
        if isinstance(only(output_layouts), Replicate):
            outputs = gather_from_region(outputs, strategy.output_split.widths, device_mesh.get_group())
        return outputs if use_local_output else _as_dtensor(outputs, only(output_layouts), mod, device_mesh)


class RowwiseParallel(_WeightParallel):
    """Cut the input features.

    A linear's `weight: (out, in/size)`, its bias whole and added once, after the sum; an embedding's
    `weight: (vocab/size, hidden)`, looked up by the rank that has the row; dim -1 of a parameter that a plan names
    itself, such as experts of (experts, out, in). Input `(..., in/size)`, or whole with `input_layouts=Replicate()`
    (own slice; backward: all-gather); output summed over the ranks (all-reduce; backward: identity).

        [x | y] ── [A / B] ── xA + yB ──g── whole
    """

    hidden: tuple[str, ...] = ("bias",)

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        use_local_output: bool = True,
        use_dtensor: bool = True,
    ) -> None:
        """`input_layouts`: Shard(-1) (default) or Replicate(). The output is whole."""
        super().__init__(
            input_layouts=(input_layouts or Shard(LAST),),
            output_layouts=Replicate(),
            desired_input_layouts=(Shard(LAST),),
            use_local_output=use_local_output,
            use_dtensor=use_dtensor,
        )

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The input features: the last dim of a weight, the rows of an embedding; a bias stays whole."""
        if self.is_embedding:
            return 0
        if ndim == 1:
            return None
        return -2 if self.is_transposed else -1

    @property
    def input_split(self) -> Split:
        """Which input features, or rows of an embedding, each rank holds."""
        return self.cut(self.in_features, self.size)

    def local_attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """An embedding's `padding_idx`, counted in the local rows."""
        if not isinstance(module, nn.Embedding) or module.padding_idx is None:
            return {}
        start, stop = self.input_split.ranges[rank][0]
        inside = start <= module.padding_idx < stop
        return {"padding_idx": module.padding_idx - start if inside else None}

    def local_hidden(self, module: nn.Module, name: str) -> Tensor | None:
        """No bias; a Conv1D cannot do without, and gets a zero."""
        return module.weight.new_zeros(1) if self.is_transposed else None  # type: ignore[union-attr,operator]

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, strategy = inputs[0], mod.tp_strategy
        assert isinstance(strategy, RowwiseParallel)
        if strategy.is_embedding:
            # Ids of other ranks' rows look up any row here; the output hook zeroes what they found.
            start, stop = strategy.input_split.ranges[device_mesh.get_local_rank()][0]
            # Ids that are nobody's stay out of range, so that the look-up fails as it does in one process.
            outside = ((x >= 0) & (x < start)) | ((x >= stop) & (x < strategy.in_features))
            forward_of(mod).notes["outside"] = outside
            x = (x - start).masked_fill(outside, 0)
        elif isinstance(x, DTensor):
            strategy.check_width(x, strategy.in_features)
            if strategy.input_split.is_chunked:
                x = x.redistribute(device_mesh, [Shard(x.ndim - 1)]).to_local()
            else:  # no placement describes the cut
                x = x.redistribute(device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])
                x = take(x, Layout(x.ndim - 1, strategy.input_split), device_mesh.get_local_rank())
        elif isinstance(only(input_layouts), Replicate):
            strategy.check_width(x, strategy.in_features)
            x = scatter_to_region(x, strategy.input_split.widths, device_mesh.get_group())
        else:
            strategy.check_width(x, strategy.input_split.widths[device_mesh.get_local_rank()])
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        outside = forward_of(mod).notes.get("outside")
        if outside is not None:
            outputs = outputs.masked_fill(outside.unsqueeze(LAST), 0)
        outputs = reduce_from_region(outputs, device_mesh.get_group())
        bias = mod._parameters.get("bias")
        if bias is not None:
            outputs = outputs + (bias.to_local() if isinstance(bias, DTensor) else bias)
        return outputs if use_local_output else _as_dtensor(outputs, Replicate(), mod, device_mesh)


class PackedColwiseParallel(ColwiseParallel):
    """Cut each part of a fused projection's output features: `AABB -> [AB, AB]`, so that nothing is gathered."""

    def __init__(self, *, parts: int | Sequence[int] = 2, use_dtensor: bool = True) -> None:
        """`parts`: the number of equal parts, or their lengths; a plan's `parts` replaces it."""
        super().__init__(use_dtensor=use_dtensor)
        self.parts = parts


class PackedRowwiseParallel(RowwiseParallel):
    """Cut each part of a fused projection's input features: `AABB -> [AB, AB]`; sum the outputs."""

    def __init__(self, *, parts: int | Sequence[int] = 2, use_dtensor: bool = True) -> None:
        """`parts`: the number of equal parts, or their lengths; a plan's `parts` replaces it."""
        super().__init__(use_dtensor=use_dtensor)
        self.parts = parts


def _as_dtensor(x: Tensor, layout: Placement | None, mod: nn.Module, mesh: DeviceMesh) -> DTensor:
    """`x` as a DTensor; raises ValueError where its width is cut in a way that no placement describes."""
    if not isinstance(layout, Shard):
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    strategy: ColwiseParallel = untyped(mod).tp_strategy
    split = strategy.output_split
    if not split.is_chunked:
        raise ValueError(f"no DTensor placement describes features cut into {split.widths}; use use_local_output=True")
    return as_sharded(x, x.ndim - 1, split.length, mesh)
