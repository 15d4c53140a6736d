"""Sequence parallelism (Korthikanti et al. 2022): between blocks, activations are cut along the sequence.

    embedding ── sequence_scatter ─┬─ sequence_parallel ── sequence_gather ─+─ ... ── sequence_parallel_rep ── head
      whole            parts       │       norm             attention, MLP  │ parts        last norm          whole
                                   └────────────────────────────────────────┘

Modules between blocks (norms, dropouts, sums) compute on a part; modules that mix tokens or are cut along features
compute on the complete sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...ranks.collectives import Group, gather_from_region, scatter_to_region
from ...slices.layout import chunked, even_widths
from ..base import TensorParallelLayer
from ..forward.attach import Forward, forward_of
from ..forward.communication import as_sharded
from ..signature import PARTIAL, REPLICATED, SEQUENCE, Signature
from .hooks import gather_around_hooks, tell_of_global_hooks
from .regather import remember
from .region import SEQUENCE_DIM, GatherMixin, RegionBlock, Widths, all_lengths, in_backward


@dataclass(frozen=True)
class _Cut:
    """How a sequence is cut, for the modules that compute on its parts."""

    widths: Widths | None
    """Length of every rank's part; None where every rank has the whole."""
    backward: int
    """Number of the backward that computes a layer again, of which it is the sequence; -1 in a forward."""
    scope: str
    """Name of that layer."""
    whole: Tensor | None = None
    """The states that were cut, which a model may return among its own."""
    exchanges: list[str] = field(default_factory=list)
    """Experts that have exchanged tokens of its parts; their routers were given a rank's own."""

    def holds(self, name: str) -> bool:
        """True if the module `name`, which runs now, is given parts of this sequence."""
        return self.backward == in_backward() and (self.backward < 0 or name.startswith(self.scope))


_current: dict[str, _Cut] = {}
"""The sequence of the forward that is under way, by the name of the group of its ranks: torch before 2.12 compiles no
keys that are weak."""


class SequenceParallel(TensorParallelLayer):
    """Apply the whole module to this rank's part of the sequence (Korthikanti et al. 2022).

    Parameters are whole; each rank has the part of their gradient that its tokens give (backward: all-reduce). A
    DTensor is redistributed to `Shard(sequence_dim)`; a plain tensor is this rank's part already.

        [x / y] ── n ── [n(x) / n(y)]
    """

    signature = Signature(SEQUENCE, SEQUENCE, gradient=PARTIAL)

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True, use_dtensor: bool = True) -> None:
        """`sequence_dim`: of the activations, which are (batch, sequence, hidden) by default."""
        self.sequence_dim = sequence_dim
        super().__init__(
            input_layouts=(Shard(sequence_dim),),
            output_layouts=(Shard(sequence_dim),),
            desired_input_layouts=(Shard(sequence_dim),),
            use_local_output=use_local_output,
            use_dtensor=use_dtensor,
        )

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, length = inputs[0], None
        if isinstance(x, DTensor):
            length = x.shape[self.sequence_dim]
            x = x.redistribute(mesh, self.desired_input_layouts).to_local()  # type: ignore[arg-type]
        forward_of(module).notes["sequence"] = (length, x)
        return (x, *inputs[1:])

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        length, x = forward_of(module).notes["sequence"]
        if self.use_local_output:
            remember(outputs, module, x)
            return outputs
        dim = self.sequence_dim % outputs.ndim
        if length is None:
            parts = all_lengths(outputs.shape[dim], mesh)
            length = sum(parts)
            if parts != chunked(length, len(parts)).widths:
                raise ValueError(
                    f"no DTensor placement describes a sequence cut into {list(parts)}; use use_local_output=True"
                )
        return as_sharded(outputs, dim, length, mesh)


class SequenceParallelRep(SequenceParallel):
    """Apply the whole module to this rank's part of the sequence, and join the parts (all-gather; backward: own slice).

    [x / y] ── n ── [n(x) / n(y)] ── whole
    """

    signature = Signature(SEQUENCE, REPLICATED, gradient=PARTIAL)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        widths = widths_of(self.name, outputs, mesh)
        return outputs if widths is None else gather_from_region(outputs, widths, mesh.get_group(), dim=SEQUENCE_DIM)


class SequenceScatterParallel(TensorParallelLayer):
    """Before the first of the modules that compute on parts: keep this rank's part of the sequence (backward:
    all-gather), which is cut as evenly as it can be; ranks beyond its length get an empty part.

    A sequence shorter than the ranks, outside of training, is replicated: a token that is generated costs one
    all-reduce a block then, rather than two collectives.

        whole ── [x / y]
    """

    signature = Signature(REPLICATED, SEQUENCE)

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *others = inputs
        length = x.shape[SEQUENCE_DIM]
        # Re-entrant checkpointing runs forwards that are trained without gradients.
        trains = torch.is_grad_enabled() or x.requires_grad
        widths = even_widths(length, mesh.size()) if trains or length >= mesh.size() else None
        _current[mesh.get_group().group_name] = _Cut(widths, in_backward(), f"{self.name}.", x)
        return (x if widths is None else scatter_to_region(x, widths, mesh.get_group(), dim=SEQUENCE_DIM), *others)


class SequenceBlock(RegionBlock):
    """A block that computes on the whole sequence, between modules that compute on parts."""

    dim, what = SEQUENCE_DIM, "sequence"
    remedy = "Sequence parallelism does not fit this model; load it without."

    @property
    def around_whole(self) -> SequenceWholeParallel:
        """See `TensorParallelLayer.around_whole`: the sequence stays cut."""
        return SequenceWholeParallel()

    def parts_of(self, x: Tensor, mesh: DeviceMesh, forward: Forward) -> Widths | None:
        """See `RegionBlock.parts_of`.

        A layer may be computed again in a backward (gradient checkpointing), which may follow other forwards. Its
        attention gets as many positions as tokens; its other blocks go by that.
        """
        length, task, cut = _told_length(forward.given), in_backward(), _current.get(mesh.get_group().group_name)
        is_under_way = task < 0 and cut is not None and cut.backward < 0
        if length is None or is_under_way or not torch.is_grad_enabled():
            return widths_of(self.name, x, mesh)
        widths = even_widths(length, mesh.size())
        if task >= 0:
            _current[mesh.get_group().group_name] = _Cut(widths, task, f"{self.name.rpartition('.')[0]}.")
        else:  # a layer that is trained by itself, whose norms sum up gradients of parts
            self.agreed = frozenset()
        return widths


class SequenceGatherParallel(GatherMixin, SequenceBlock):
    """Around a block that computes locally on the whole sequence: join the parts of the input (all-gather; backward:
    reduce-scatter), sum the output and keep this rank's part (reduce-scatter; backward: all-gather).

        [x / y] ── whole ── [ local_colwise ── local_rowwise ] ── [x' / y']
    """

    signature = Signature(SEQUENCE, SEQUENCE, inside=(REPLICATED, PARTIAL))


class SequenceWholeParallel(SequenceBlock):
    """Around a block that makes a whole output of a whole input: join the parts of the input (all-gather; backward: own
    slice), keep this rank's part of the output (backward: all-gather).

        [x / y] ── whole ── [ any strategies ] ── whole ── [x' / y']
    """

    signature = Signature(SEQUENCE, SEQUENCE, inside=(REPLICATED, REPLICATED))


class SequenceStatesParallel(TensorParallelLayer):
    """Around a model with layers that compute on parts: join the `hidden_states` that it returns (all-gather; backward:
    own slice). Its last one is that of `sequence_parallel_rep`, and whole.

    A forward begins and ends here: a call outside of one is given whole sequences.
    """

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        gather_around_hooks(module, self.name, widths_of, mesh)

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        _current.pop(mesh.get_group().group_name, None)
        if not torch.compiler.is_compiling():
            tell_of_global_hooks()
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()
        cut = _current.pop(group.group_name, None)
        if cut is None or cut.widths is None:
            return outputs
        widths = cut.widths
        last = outputs[0]

        def whole(state: Tensor | None) -> Tensor | None:
            if state is None or state is last or state is cut.whole:
                return state
            return gather_from_region(state, widths, group, dim=SEQUENCE_DIM)

        def joined(value: Any) -> Any:
            """Hidden states, or the outputs of routers for parts, (tokens, experts), of the whole sequence."""
            if _are_states(value, last):
                return tuple(map(whole, value))
            is_of_parts = isinstance(value, tuple) and value and len(value) == len(cut.exchanges)
            if not is_of_parts or not all(isinstance(each, Tensor) and each.ndim == 2 for each in value):
                return value
            part = (last.shape[0], widths[self.rank])
            return tuple(
                gather_from_region(each.unflatten(0, part), widths, group, dim=SEQUENCE_DIM).flatten(0, 1)
                for each in value
            )

        if isinstance(outputs, tuple):  # return_dict=False
            return tuple(map(joined, outputs))
        for name in ("hidden_states", "router_logits"):
            if outputs.get(name) is not None:
                outputs[name] = joined(outputs[name])
        return outputs

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        _current.pop(mesh.get_group().group_name, None)


def _are_states(value: Any, last: Tensor) -> bool:
    """True if a value of a model's output is its hidden states: a tuple of tensors as wide as the last, and of its
    number of dims.
    """
    return isinstance(value, tuple) and all(
        state is None or (isinstance(state, Tensor) and state.ndim == last.ndim and state.shape[-1] == last.shape[-1])
        for state in value
    )


def _told_length(given: Mapping[str, Any]) -> int | None:
    """Tokens of the whole sequence, where the arguments of a module tell."""
    positions, rotations = given.get("position_ids"), given.get("position_embeddings")
    if isinstance(positions, Tensor):
        return positions.shape[-1]
    return rotations[0].shape[-2] if isinstance(rotations, tuple) else None


def exchange_parts(name: str, group: Group) -> bool:
    """True if the experts `name` exchange tokens, where each rank has a part; notes that they do."""
    cut = _current.get(group.group_name)
    if cut is None or not cut.holds(name):
        return in_backward() >= 0
    if cut.widths is not None:
        cut.exchanges.append(name)
    return cut.widths is not None


def is_cut(group: Group) -> bool:
    """True if a module between blocks is given this rank's part of a sequence.

    A trained sequence always is cut, also where a backward computes it again after another forward.
    """
    cut = _current.get(group.group_name)
    return torch.is_grad_enabled() or (cut is not None and cut.backward == in_backward() and cut.widths is not None)


def widths_of(name: str, x: Tensor, mesh: DeviceMesh) -> Widths | None:
    """How the sequence is cut of which the module `name` has the part `x`; None where `x` is whole.

    Computed again in a backward that does not say so, it comes from the ranks (one all-gather of a number).
    """
    cut = _current.get(mesh.get_group().group_name)
    if cut is not None and cut.holds(name):
        return cut.widths
    return all_lengths(x.shape[SEQUENCE_DIM], mesh) if in_backward() >= 0 else None
