"""Sequence parallelism (Korthikanti et al. 2022): between blocks, activations are sharded along the sequence.

    embedding ── sequence_scatter ─┬─ sequence_parallel ── sequence_gather ─+─ ... ── sequence_parallel_rep ── head
      full            shards       │       norm             attention, MLP  │ shards       last norm           full
                                   └────────────────────────────────────────┘

Modules between blocks (norms, dropouts, sums) compute on a shard of the sequence; modules that mix tokens or are
sharded along features compute on the full sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...errors import UnsupportedError
from ...ranks.collectives import Group, gather_from_region, scatter_to_region
from ...ranks.group import agreed
from ...slices.layout import chunked
from ...strategies.base import STRATEGY, TensorParallelLayer
from ...strategies.forward.attach import Forward, forward_of
from ...strategies.forward.communication import as_sharded
from ...strategies.shards.shard import ParamShard
from ...strategies.signature import PARTIAL, REPLICATED, SEQUENCE, Signature
from ...torch_api import top_saved_tensors_hooks
from .hooks import gather_around_hooks, warn_of_global_hooks
from .region import SEQUENCE_DIM, GatherMixin, RegionBlock, Widths, all_lengths, in_backward, remember


@dataclass(frozen=True)
class _Sharding:
    """Sharding of a sequence, for the modules that compute on its shards."""

    widths: Widths | None
    """Length of each rank's shard; None if the sequence is replicated."""
    backward: int
    """Id of the backward that recomputes a layer with this sequence; -1 in a forward."""
    scope: str
    """Name prefix of the modules in that layer, or in the model."""
    full: Tensor | None = None
    """The hidden states before sharding, which a model may return among its outputs."""
    exchanges: list[str] = field(default_factory=list)
    """Names of experts that exchanged tokens; their routers saw only this rank's tokens."""

    def holds(self, name: str) -> bool:
        """True if this sequence is the input of the module `name`, which runs now."""
        return self.backward == in_backward() and (self.backward < 0 or name.startswith(self.scope))

    def is_all(self, x: Tensor, mesh: DeviceMesh) -> bool:
        """True if `x`, of any shape (..., features), has all tokens: a hook calls modules with what it has seen."""
        if self.widths is None or self.full is None or torch.compiler.is_compiling():
            return self.widths is None
        count, every = x.shape[:-1].numel(), self.full.shape[:-1].numel()
        counts = all_lengths(count, mesh) if sum(self.widths) in self.widths else (count,)  # one rank may hold all
        return all(each == every for each in counts)


_current: dict[str, _Sharding] = {}
"""{group name: sequence of the current forward}. Not weak keys by group: torch before 2.12 cannot compile them."""
_in_model: dict[str, bool] = {}
"""{group name: True while the base model runs, whose hidden states are gathered after the last norm}."""


class _SequenceMember(TensorParallelLayer):
    """A strategy of a module in a base model with a sharded sequence."""

    ends_with_base = False
    """True if the sequence ends with the base model: a module that is called by itself then takes a full sequence."""
    is_reentrant = False
    """True if the module was called by itself as re-entrant checkpointing calls it."""

    def is_alone(self, x: Tensor, mesh: DeviceMesh) -> bool:
        """True if the module is called by itself, with a full sequence `x`, outside of a forward of its base model.

        Raises UnsupportedError in the recomputation of such a call, if the backward uses its results.
        """
        if in_backward() >= 0:
            if self.is_reentrant and torch.is_grad_enabled() and _sharding_of(self.name, mesh) is None:
                raise self.not_recomputed()
            return False
        if not self.ends_with_base or _in_model[mesh.get_group().group_name]:
            return False
        if not torch.compiler.is_compiling():
            self.is_reentrant |= x.requires_grad and not torch.is_grad_enabled()
        return True

    def not_recomputed(self) -> UnsupportedError:
        """Make the error for a module that is called by itself with gradient checkpointing: a recomputation could not
        tell a full sequence from a shard.
        """
        return agreed(
            UnsupportedError(
                f"gradient checkpointing of {self.name}",
                got="a module that is called by itself, in a model with tp_sequence_parallel",
                expected="a call of the base model",
                fix="Call the base model, call the module without checkpointing, or load without tp_sequence_parallel.",
            )
        )


class SequenceParallel(_SequenceMember):
    """Apply a replicated module to this rank's shard of the sequence (Korthikanti et al. 2022).

    Gradients of parameters are partial sums over this rank's tokens (backward: all-reduce). A DTensor input is
    redistributed to `Shard(sequence_dim)`; a plain tensor is this rank's shard already. With `tp_sequence_parallel`, a
    module that is called by itself takes the full sequence, and gradients are not summed.

        [x / y] ── n ── [n(x) / n(y)]
    """

    signature = Signature(SEQUENCE, SEQUENCE, gradient=PARTIAL)

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True, use_dtensor: bool = True) -> None:
        """`sequence_dim`: sequence dim of the activations; 1 for (batch, sequence, hidden)."""
        self.sequence_dim = sequence_dim
        super().__init__(
            input_layouts=(Shard(sequence_dim),),
            output_layouts=(Shard(sequence_dim),),
            desired_input_layouts=(Shard(sequence_dim),),
            use_local_output=use_local_output,
            use_dtensor=use_dtensor,
        )

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, length, notes = inputs[0], None, forward_of(module).notes
        if isinstance(x, DTensor):
            length = x.shape[self.sequence_dim]
            x = x.redistribute(mesh, self.desired_input_layouts).to_local()  # type: ignore[arg-type]
        elif self.ends_with_base:
            notes["full"] = self.is_alone(x, mesh) or (in_backward() < 0 and widths_of(self.name, x, mesh) is None)
        notes["sequence"] = (length, x)
        return (x, *inputs[1:])

    def local_parameters(self, module: nn.Module, views: Mapping[str, ParamShard]) -> dict[str, Tensor | None]:
        """See `Communication.local_parameters`: none for a full sequence, since they sum gradients over the ranks."""
        return {} if forward_of(module).notes.get("full") else super().local_parameters(module, views)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        length, x = forward_of(module).notes["sequence"]
        if self.use_local_output:
            remember(outputs, module, x)
            return outputs
        dim = self.sequence_dim % outputs.ndim
        if length is None:
            widths = all_lengths(outputs.shape[dim], mesh)
            length = sum(widths)
            if widths != chunked(length, len(widths)).widths:
                raise ValueError(
                    f"no DTensor placement describes a sequence sharded into {list(widths)}; use use_local_output=True"
                )
        return as_sharded(outputs, dim, length, mesh)


class SequenceParallelRep(SequenceParallel):
    """Apply a replicated module to this rank's shard of the sequence; gather (all-gather; backward: own slice).

    [x / y] ── n ── [n(x) / n(y)] ── n(xy)
    """

    signature = Signature(SEQUENCE, REPLICATED, gradient=PARTIAL)

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        widths = widths_of(self.name, outputs, mesh)
        return outputs if widths is None else gather_from_region(outputs, widths, mesh.get_group(), dim=SEQUENCE_DIM)


class SequenceScatterParallel(_SequenceMember):
    """Before the first sequence-parallel module: keep this rank's shard of the sequence (backward: all-gather).

    Shards differ by at most one token; if there are fewer tokens than ranks, some are empty. Outside training, a
    sequence shorter than the number of ranks stays replicated, so that a generated token costs one all-reduce per block
    rather than two collectives.

        xy ── [x / y]
    """

    signature = Signature(REPLICATED, SEQUENCE)

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *others = inputs
        if self.is_alone(x, mesh):
            if _is_checkpointed() or (module.training and getattr(module, "gradient_checkpointing", False)):
                raise self.not_recomputed()
            return inputs
        length = x.shape[SEQUENCE_DIM]
        # Re-entrant checkpointing runs training forwards without recording gradients.
        trains = torch.is_grad_enabled() or x.requires_grad
        widths = self.ranks.counts(length) if trains or length >= mesh.size() else None
        _current[mesh.get_group().group_name] = _Sharding(widths, in_backward(), f"{self.name}.", x)
        return (x if widths is None else scatter_to_region(x, widths, mesh.get_group(), dim=SEQUENCE_DIM), *others)


class SequenceBlock(RegionBlock, _SequenceMember):
    """A block that computes on the full sequence, between modules that compute on shards."""

    dim, what = SEQUENCE_DIM, "sequence"
    remedy = "Call the base model, or load without tp_sequence_parallel, if it does not fit this model."

    @property
    def around_replicated(self) -> SequenceReplicatedParallel:
        """See `TensorParallelLayer.around_replicated`: the sequence stays sharded."""
        return SequenceReplicatedParallel()

    def input_widths(self, x: Tensor, mesh: DeviceMesh, forward: Forward) -> Widths | None:
        """See `RegionBlock.input_widths`.

        Gradient checkpointing recomputes a layer in the backward, possibly after other forwards. Attention then finds
        the sequence length in its position arguments, and the other blocks of the layer use it.
        """
        if self.is_alone(x, mesh):
            if _is_checkpointed():
                raise self.not_recomputed()
            return None
        length, backward = _full_length(forward.given), in_backward()
        if length is None or backward < 0 or not torch.is_grad_enabled():
            return widths_of(self.name, x, mesh)
        widths = self.ranks.counts(length)
        _current[mesh.get_group().group_name] = _Sharding(widths, backward, f"{self.name.rpartition('.')[0]}.")
        return widths

    def is_sharded(self, group: Group) -> bool:
        """True if a module between blocks takes this rank's shard of the sequence.

        In training the sequence is always sharded, also when a backward recomputes it after another forward.
        """
        sharding, backward = _current.get(group.group_name), in_backward()
        if backward < 0 and not _in_model.get(group.group_name, True):  # a module that is called by itself
            return False
        return torch.is_grad_enabled() or (
            sharding is not None and sharding.backward == backward and sharding.widths is not None
        )


class SequenceGatherParallel(GatherMixin, SequenceBlock):
    """Around a block that computes locally on the full sequence: gather the input (all-gather; backward:
    reduce-scatter), sum and scatter the output (reduce-scatter; backward: all-gather).

        [x / y] ── xy ── [ local_colwise ── local_rowwise ] ── [x' / y']
    """

    signature = Signature(SEQUENCE, SEQUENCE, inside=(REPLICATED, PARTIAL))


class SequenceReplicatedParallel(SequenceBlock):
    """Around a block with replicated input and output: gather the input (all-gather; backward: own slice), keep this
    rank's shard of the output (backward: all-gather).

        [x / y] ── xy ── [ any strategies ] ── x'y' ── [x' / y']
    """

    signature = Signature(SEQUENCE, SEQUENCE, inside=(REPLICATED, REPLICATED))


class SequenceStatesParallel(TensorParallelLayer):
    """Around a base model with sequence-parallel layers: gather the `hidden_states` that it returns (all-gather;
    backward: own slice). The last one, from `sequence_parallel_rep`, is full already.

    A forward begins and ends here. Modules that are called outside a forward take full sequences.
    """

    def completed(self, module: nn.Module, mesh: DeviceMesh) -> None:
        gather_around_hooks(module, self.name, widths_of, mesh)
        _in_model[mesh.get_group().group_name] = False  # before torch.compile guards it
        for strategy in filter(None, map(STRATEGY.find, module.modules())):
            if isinstance(strategy, _SequenceMember):
                strategy.ends_with_base = True

    def before(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        _current.pop(mesh.get_group().group_name, None)
        _in_model[mesh.get_group().group_name] = True
        if not torch.compiler.is_compiling():
            warn_of_global_hooks()
        return inputs

    def after(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()
        sharding = _current.pop(group.group_name, None)
        _in_model[group.group_name] = False
        if sharding is None or sharding.widths is None:
            return outputs
        widths = sharding.widths
        last = outputs[0]

        def gather_state(state: Tensor | None) -> Tensor | None:
            if state is None or state is last or state is sharding.full:
                return state
            return gather_from_region(state, widths, group, dim=SEQUENCE_DIM)

        def gather(value: Any) -> Any:
            """Gather hidden states, and router outputs (tokens, experts) of shards; return other values as they are."""
            if _are_states(value, last):
                return tuple(map(gather_state, value))
            is_router_output = isinstance(value, tuple) and value and len(value) == len(sharding.exchanges)
            if not is_router_output or not all(isinstance(rows, Tensor) and rows.ndim == 2 for rows in value):
                return value
            local_shape = (last.shape[0], widths[self.rank])
            return tuple(
                gather_from_region(rows.unflatten(0, local_shape), widths, group, dim=SEQUENCE_DIM).flatten(0, 1)
                for rows in value
            )

        if isinstance(outputs, tuple):  # return_dict=False
            return tuple(map(gather, outputs))
        for name in ("hidden_states", "router_logits"):
            if outputs.get(name) is not None:
                outputs[name] = gather(outputs[name])
        return outputs

    def interrupted(self, module: nn.Module, mesh: DeviceMesh) -> None:
        _current.pop(mesh.get_group().group_name, None)
        _in_model[mesh.get_group().group_name] = False


def _are_states(value: Any, last: Tensor) -> bool:
    """True if an output value is hidden states: a tuple of tensors with the hidden size and ndim of `last`."""
    return isinstance(value, tuple) and all(
        state is None or (isinstance(state, Tensor) and state.ndim == last.ndim and state.shape[-1] == last.shape[-1])
        for state in value
    )


def _is_checkpointed() -> bool:
    """True in a forward under gradient checkpointing that is not re-entrant."""
    hooks = None if torch.compiler.is_compiling() else top_saved_tensors_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _full_length(given: Mapping[str, Any]) -> int | None:
    """Return the length of the full sequence from position arguments of a module; None without them."""
    positions, rotations = given.get("position_ids"), given.get("position_embeddings")
    if isinstance(positions, Tensor):
        return positions.shape[-1]
    return rotations[0].shape[-2] if isinstance(rotations, tuple) else None


def _sharding_of(name: str, mesh: DeviceMesh) -> _Sharding | None:
    """Return the sharding of the sequence that module `name` computes on now; None if none is recorded."""
    sharding = _current.get(mesh.get_group().group_name)
    return sharding if sharding is not None and sharding.holds(name) else None


def exchange_shards(name: str, states: Tensor, mesh: DeviceMesh) -> bool:
    """True if the experts `name` exchange tokens, as their input `states` is sharded; records the exchange."""
    sharding = _sharding_of(name, mesh)
    if sharding is None:
        return in_backward() >= 0
    if sharding.is_all(states, mesh):
        return False
    sharding.exchanges.append(name)
    return True


def widths_of(name: str, x: Tensor, mesh: DeviceMesh) -> Widths | None:
    """Return each rank's length of the sequence in the input `x` of module `name`; None if `x` is full, as it is for a
    module that a hook calls with what it has seen.

    In a recomputation without a recorded sequence, the ranks exchange their lengths (one all-gather of a number).
    """
    sharding = _sharding_of(name, mesh)
    if sharding is None:
        return all_lengths(x.shape[SEQUENCE_DIM], mesh) if in_backward() >= 0 else None
    return None if sharding.is_all(x, mesh) else sharding.widths
