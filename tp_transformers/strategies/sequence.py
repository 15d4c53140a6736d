"""Sequence parallelism (Korthikanti et al. 2022): between blocks, activations are cut along the sequence.

    embedding ── sequence_scatter ─┬─ sequence_parallel ── sequence_gather ─+─ ... ── sequence_parallel_rep ── head
      whole            parts       │       norm             attention, MLP  │ parts        last norm          whole
                                   └────────────────────────────────────────┘

What stands between blocks (norms, dropouts, sums) computes on a part; what mixes tokens or is cut along features
computes on the whole.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives import Group, all_gather_uneven, gather_from_region, scatter_to_region
from ..errors import PlanError, describe
from ..layout import chunked, even
from .base import Placements, TensorParallelLayer, as_sharded
from .regather import remember
from .region import GatherMixin, RegionBlock, WholeMixin, Widths

SEQUENCE = 1
"""The sequence dim of a model's activations: (batch, sequence, hidden)."""

_current: WeakKeyDictionary[Group, Widths | None] = WeakKeyDictionary()
"""How the sequence of the forward that is under way over some ranks is cut; None where every rank has the whole."""


class SequenceParallel(TensorParallelLayer):
    """Apply the whole module to this rank's part of the sequence (Korthikanti et al. 2022).

    Parameters are whole; each rank has the part of their gradient that its tokens give (backward: all-reduce). A
    DTensor is redistributed to `Shard(sequence_dim)`; a plain tensor is this rank's part already.

        [x / y] ── n ── [n(x) / n(y)]
    """

    sums_gradients = True

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

    def interrupted(self, module: nn.Module) -> None:
        """See `TensorParallelLayer.interrupted`."""
        module.__dict__.pop("_tp_sequence", None)

    @property
    def takes_sharded_input(self) -> bool:
        """Its features are whole; the sequence is cut."""
        return False

    @property
    def leaves_sharded_output(self) -> bool:
        """Its features are whole; the sequence is cut."""
        return False

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, length, strategy = inputs[0], None, mod.tp_strategy
        assert isinstance(strategy, SequenceParallel)
        if isinstance(x, DTensor):
            length = x.shape[strategy.sequence_dim]
            x = x.redistribute(device_mesh, desired_input_layouts).to_local()  # type: ignore[arg-type]
        mod.__dict__["_tp_sequence"] = (length, x)
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        (length, x), strategy = mod.__dict__.pop("_tp_sequence"), mod.tp_strategy
        assert isinstance(strategy, SequenceParallel)
        if use_local_output:
            remember(outputs, mod, x)
            return outputs
        dim = strategy.sequence_dim % outputs.ndim
        if length is None:
            own = torch.tensor([outputs.shape[dim]], device=outputs.device)
            parts = all_gather_uneven(own, [1] * device_mesh.size(), device_mesh.get_group()).tolist()
            length = sum(parts)
            if tuple(parts) != chunked(length, len(parts)).widths:
                raise ValueError(
                    f"no DTensor placement describes a sequence cut into {parts}; use use_local_output=True"
                )
        return as_sharded(outputs, dim, length, device_mesh)


class SequenceParallelRep(SequenceParallel):
    """Apply the whole module to this rank's part of the sequence, and join the parts (all-gather; backward: own slice).

    [x / y] ── n ── [n(x) / n(y)] ── whole
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        del mod.__dict__["_tp_sequence"]
        widths, group = _widths(device_mesh), device_mesh.get_group()
        return outputs if widths is None else gather_from_region(outputs, widths, group, dim=SEQUENCE)


class SequenceScatterParallel(TensorParallelLayer):
    """Before the first of the modules that compute on parts: keep this rank's part of the sequence (backward:
    all-gather), which is cut as evenly as it can be; ranks beyond its length get an empty part.

    What is shorter than the ranks, and is no training, stays whole on all of them: a token that is generated costs one
    all-reduce a block then, rather than two collectives.

        whole ── [x / y]
    """

    cuts_sequence = True

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Placements,
        desired_input_layouts: Placements,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x, *others = inputs
        length = x.shape[SEQUENCE]
        # Re-entrant checkpointing runs forwards that are trained without gradients.
        trains = torch.is_grad_enabled() or x.requires_grad
        widths = even(length, device_mesh.size()).widths if trains or length >= device_mesh.size() else None
        _current[device_mesh.get_group()] = widths
        return (x if widths is None else scatter_to_region(x, widths, device_mesh.get_group(), dim=SEQUENCE), *others)


class SequenceBlock(RegionBlock):
    """A block that computes on the whole sequence, between modules that compute on parts."""

    dim = SEQUENCE

    def prepare_keywords(self, keywords: dict[str, Any], rank: int) -> dict[str, Any]:
        """See `TensorParallelLayer.prepare_keywords`; from here is known how long the sequence is.

        A block that is computed again in a backward (gradient checkpointing) may follow other forwards.
        """
        positions, rotations = keywords.get("position_ids"), keywords.get("position_embeddings")
        if positions is not None:
            self.length = positions.shape[-1]
        elif isinstance(rotations, tuple):
            self.length = rotations[0].shape[-2]
        return keywords

    length: int | None = None
    """Of the sequence, where the module is told."""

    def parts_of(self, x: Tensor, mesh: DeviceMesh) -> Widths | None:
        """See `RegionBlock.parts_of`."""
        if torch.is_grad_enabled() and self.length is not None:
            _current[mesh.get_group()] = even(self.length, mesh.size()).widths
        return _widths(mesh)

    def rows_of(self, x: Tensor, widths: Widths) -> Tensor:
        """See `RegionBlock.rows_of`."""
        return x.unflatten(0, (-1, sum(widths))) if x.shape[0] % sum(widths) == 0 else x

    def misfit(self, what: str, x: Tensor, length: int) -> PlanError:
        """See `RegionBlock.misfit`."""
        return PlanError(
            describe(
                self.name,
                got=f"{what} of shape {tuple(x.shape)}",
                expected=f"(batch, {length}, features), as the sequence is cut",
                fix="Sequence parallelism does not fit this model; load it without.",
            )
        )


class SequenceGatherParallel(GatherMixin, SequenceBlock):
    """Around a block that computes locally on the whole sequence: join the parts of the input (all-gather; backward:
    reduce-scatter), sum the output and keep this rank's part (reduce-scatter; backward: all-gather).

        [x / y] ── whole ── [ local_colwise ── local_rowwise ] ── [x' / y']
    """

    @property
    def around_whole(self) -> SequenceWholeParallel:
        """See `RegionBlock.around_whole`."""
        return SequenceWholeParallel()


class SequenceWholeParallel(WholeMixin, SequenceBlock):
    """Around a block that makes a whole output of a whole input: join the parts of the input (all-gather; backward: own
    slice), keep this rank's part of the output (backward: all-gather).

        [x / y] ── whole ── [ any strategies ] ── whole ── [x' / y']
    """


class SequenceStatesParallel(TensorParallelLayer):
    """Around a model whose layers compute on parts: join the `hidden_states` that it returns (all-gather; backward: own
    slice). Its last one is that of `sequence_parallel_rep`, and whole.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Placements, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        widths, group = _widths(device_mesh), device_mesh.get_group()
        if widths is None:
            return outputs
        last = outputs[0]

        def whole(state: Tensor | None) -> Tensor | None:
            return state if state is None or state is last else gather_from_region(state, widths, group, dim=SEQUENCE)

        if isinstance(outputs, tuple):  # return_dict=False
            return tuple(tuple(map(whole, value)) if _are_states(value, last) else value for value in outputs)
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(map(whole, outputs["hidden_states"]))
        return outputs


def _are_states(value: Any, last: Tensor) -> bool:
    """Whether a value of a model's output is its hidden states: a tuple of tensors as wide as the last, and of its
    number of dims.
    """
    return isinstance(value, tuple) and all(
        state is None or (isinstance(state, Tensor) and state.ndim == last.ndim and state.shape[-1] == last.shape[-1])
        for state in value
    )


def is_cut(group: Group) -> bool:
    """Whether a module between blocks is given this rank's part of a sequence.

    What is trained always is cut, also where a backward computes it again after another forward.
    """
    return torch.is_grad_enabled() or _current.get(group) is not None


def _widths(mesh: DeviceMesh) -> Widths | None:
    """How the sequence of the forward that is under way is cut; None where every rank has the whole."""
    return _current.get(mesh.get_group())
