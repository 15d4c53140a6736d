"""Adapter for the styles of `torch.distributed.tensor.parallel`: our loading, torch's communication.

Parameters are DTensors, sharded as `torch.chunk` splits. A module takes and returns tensors in the layouts of its
style. With `use_local_output=False` outputs are DTensors, which also describe uneven shards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)

from ...anatomy import embeds_states
from ...ranks.group import TensorParallelGroup
from ...slices.layout import Ranks, Split, chunked
from ...strategies.base import TensorParallelLayer
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import ANY, BATCH, FEATURES, PARTIAL, SEQUENCE, Signature, only, state_of

_Linears = torch_parallel.ColwiseParallel | torch_parallel.RowwiseParallel

SUPPORTED: tuple[type[ParallelStyle], ...] = (
    torch_parallel.ColwiseParallel,
    torch_parallel.RowwiseParallel,
    torch_parallel.SequenceParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
"""Styles that shard parameters in a way known before they are applied."""

OWN_NAMES = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise", "SequenceParallel": "sequence_parallel"}


class TorchStyleParallel(TensorParallelLayer):
    """A style of torch. ColwiseParallel shards a linear's weight and bias along dim 0, an embedding's weight along dim
    1; RowwiseParallel a linear's weight along dim 1, an embedding's along dim 0; all others replicate parameters.

        x ── style's input ── module of DTensors ── style's output ── y
    """

    shards_as_torch = True

    def __init__(self, style: ParallelStyle) -> None:
        """`style`: is copied, since a style may store the module that it was applied to."""
        self.style = copy.deepcopy(style)
        output = getattr(style, "prepare_module_output", style)
        super().__init__(
            input_layouts=getattr(style, "input_layouts", None),
            output_layouts=getattr(style, "output_layouts", None),
            use_local_output=isinstance(output, PrepareModuleInput) or getattr(output, "use_local_output", True),
            use_dtensor=isinstance(style, _Linears | torch_parallel.SequenceParallel),
        )
        self.signature = _signature(style)

    def bind(self, module: nn.Module, size: int, **options: Any) -> TensorParallelLayer:
        """See `TensorParallelLayer.bind`; ids, the input of an embedding, have no features."""
        bound = super().bind(module, size, **options)
        bound.signature = self.signature  # which the adapter has completed in its own way
        if bound.is_embedding and bound.signature.takes is FEATURES:
            bound.signature = replace(bound.signature, takes=ANY)
        return bound

    @property
    def shown(self) -> str:
        """Name of the style in messages."""
        return f"torch's {type(self.style).__name__}"

    def check(self, module: nn.Module) -> None:
        """Raise ValueError for a style or module that is not supported, or layouts that do not fit the module."""
        kind = type(module).__name__
        if not _is_known(type(self.style)):
            raise ValueError(
                f"{type(self.style).__name__} is a style of its own, and how it shards is not known before it is "
                "applied; leave it out of the plan, and apply it to the loaded model with torch's "
                "parallelize_module(module, mesh, style)"
            )
        if self.unit is not None or self.widths:
            raise ValueError(f"{self.shown} takes no unit and no widths")
        if isinstance(self.style, _Linears) and not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"{self.shown} is for nn.Linear and nn.Embedding, not for a {kind}; use a strategy's name, such as "
                f"{OWN_NAMES[_known_base(type(self.style)).__name__]!r}"
            )
        if self.signature.takes is SEQUENCE and any(module.children()):
            raise ValueError(f"{self.shown} is for a norm or a dropout, not for a {kind} with modules of its own")
        if self.signature.leaves is FEATURES and self.use_local_output and embeds_states(module, self.config):
            raise ValueError(
                f"{self.shown} would leave each rank a shard of the hidden features, of which what follows takes "
                "all; give it output_layouts=Replicate()"
            )
        if self.signature.sums and self.is_embedding and self.input_layouts == (Shard(-1),):
            raise ValueError(
                f"{self.shown} takes ids that are sharded over the ranks; give it input_layouts=Replicate()"
            )

    def split_dim(self, param_type: str, ndim: int) -> int | None:
        """The dim along which torch shards a linear or an embedding."""
        if isinstance(self.style, torch_parallel.ColwiseParallel):
            return 1 if self.is_embedding else 0
        if self.signature.sums:
            return 0 if self.is_embedding else 1 if ndim == 2 else None
        return None

    def shard(self, param_type: str, shape: torch.Size, group: TensorParallelGroup) -> ParamShard:
        """See `TensorParallelLayer.shard`: a DTensor, also for a replicated parameter."""
        return replace(super().shard(param_type, shape, group), use_dtensor=self.use_dtensor)

    def _split_length(self, length: int, ranks: Ranks, unit: int) -> Split:
        size = ranks.size
        if ranks.shares is not None:
            raise ValueError(f"{self.shown} splits evenly, not by shares; use strategies by name, such as colwise")
        split = chunked(length, size)
        if self.split is not None:
            heads = super()._split_length(length, ranks, unit)
            if length % size or not heads.is_chunked:
                raise ValueError(
                    f"{self.shown} does not know of its {self.split.length} heads, and cannot split them for {size} "
                    'ranks; use the strategies colwise and rowwise by name, or tp_plan="auto"'
                )
        return split

    def attached(self, module: nn.Module, shards: Mapping[str, ParamShard], mesh: DeviceMesh) -> None:
        """Let torch apply the style. Parameters are sharded already and stay as they are."""
        parameters = dict(module._parameters)
        if self.signature.takes is SEQUENCE:  # torch would treat them as plain tensors
            module._parameters.clear()
        try:
            copy.copy(self.style)._apply(module, mesh)
        finally:
            module._parameters.update(parameters)

    def __repr__(self) -> str:
        style = type(self.style)
        if style not in SUPPORTED[:3]:
            return f"torch.{self.style!r}"
        defaults = vars(style())
        changed = {
            name: value for name, value in vars(self.style).items() if name in defaults and value != defaults[name]
        }
        shown = (f"{name}={value[0] if isinstance(value, tuple) else value!r}" for name, value in changed.items())
        return f"torch.{style.__name__}({', '.join(shown)})"


def _is_known(style: type[ParallelStyle]) -> bool:
    """True if `style` is a supported class, or a subclass that shards parameters as its base does."""
    base = _known_base(style)
    methods = [name for name in vars(base) if name == "_apply" or name.startswith("_partition")]
    return issubclass(style, SUPPORTED) and all(getattr(style, name) is getattr(base, name) for name in methods)


def _known_base(style: type[ParallelStyle]) -> type[ParallelStyle]:
    return next((base for base in SUPPORTED if issubclass(style, base)), style)


def _signature(style: ParallelStyle) -> Signature:
    if isinstance(style, torch_parallel.SequenceParallel):
        return Signature(SEQUENCE, SEQUENCE, gradient=PARTIAL)
    shards_sequence = any(state_of(placement) in (SEQUENCE, BATCH) for placement in _placements(style))
    leaves = SEQUENCE if shards_sequence else ANY  # output_layouts may be redistributed from another placement
    if not isinstance(style, _Linears):
        return Signature(ANY, leaves)
    return Signature(
        FEATURES if state_of(only(style.input_layouts)) is FEATURES else ANY,
        FEATURES if state_of(only(style.output_layouts)) is FEATURES else leaves,
        inside=(FEATURES, PARTIAL) if isinstance(style, torch_parallel.RowwiseParallel) else None,
    )


def _placements(style: Any) -> Iterator[Placement | None]:
    """Yield the placements of a style's desired inputs and outputs."""
    if isinstance(style, PrepareModuleInputOutput):
        yield from _placements(style.prepare_module_input)
        yield from _placements(style.prepare_module_output)
    elif isinstance(style, PrepareModuleInput):
        yield from style.desired_input_layouts or ()
        yield from style.desired_input_kwarg_layouts.values()
    elif isinstance(style, PrepareModuleOutput):
        yield from style.desired_output_layouts
    elif isinstance(style, _Linears):
        yield from style.output_layouts
