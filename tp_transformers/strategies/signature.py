"""The signature of a strategy: placements of activations before and after its module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

Placements = Sequence[Placement] | Placement | None


class State(Enum):
    """Placement of a tensor over the ranks, in DTensor's terms; activations are (batch, sequence, features)."""

    ANY = "any"
    """Any placement; the strategy declares none."""
    REPLICATED = "Replicate()"
    FEATURES = "Shard(-1)"
    SEQUENCE = "Shard(1)"
    BATCH = "Shard(0)"
    """Each rank has its own samples."""
    LOCAL = "Shard()"
    """A shard of features, heads or tokens; each rank computes on it without communication."""
    PARTIAL = "Partial()"
    """Each rank has a tensor of the full shape; their sum is the value."""


ANY, REPLICATED, FEATURES, SEQUENCE, BATCH, LOCAL, PARTIAL = State


@dataclass(frozen=True)
class Signature:
    """Placements of a module's inputs and outputs, and of those of its own forward.

    colwise           REPLICATED -> FEATURES
    rowwise           FEATURES   -> PARTIAL, summed -> REPLICATED
    local_rowwise     FEATURES   -> PARTIAL
    gather            REPLICATED -> modules of the block: PARTIAL, summed -> REPLICATED
    sequence_gather   SEQUENCE   -> REPLICATED -> modules of the block: PARTIAL, summed -> SEQUENCE

    A class declares a signature as a class attribute. Read from a strategy of the class, the layouts of that strategy
    complete the signature (`__get__`), wherever the strategy got them.
    """

    takes: State = ANY
    leaves: State = ANY
    inside: tuple[State, State] | None = None
    """Placements at the input and output of the module's own forward, or of a block's modules, if they differ."""
    gradient: State = REPLICATED
    """PARTIAL if the gradients of replicated parameters are partial sums (backward: all-reduce)."""

    def __get__(self, strategy: Any, owner: type | None = None) -> Signature:
        """The declared signature of a class; for a strategy of the class, its layouts replace ANY."""
        if strategy is None:
            return self
        takes = state_of(only(strategy.input_layouts)) if self.takes is ANY else self.takes
        leaves = state_of(only(strategy.output_layouts)) if self.leaves is ANY else self.leaves
        return replace(self, takes=takes, leaves=leaves)

    @property
    def sums(self) -> bool:
        """True if partial results are summed over the ranks."""
        return self.inside is not None and self.inside[1] is PARTIAL and self.leaves is not PARTIAL

    @property
    def gathers_features(self) -> bool:
        """True for a module between sharded linears that every rank computes in full."""
        return self.takes is LOCAL and self.inside == (REPLICATED, REPLICATED)

    @property
    def computes_locally(self) -> bool:
        """True for a module with its own forward on sharded features or heads."""
        return self.inside == (LOCAL, LOCAL)


def state_of(placement: Placement | None) -> State:
    """The state that equals a DTensor placement of activations (batch, sequence, features) on the `tp` axis."""
    if isinstance(placement, Shard):
        return BATCH if placement.dim in (0, -3) else SEQUENCE if placement.dim in (1, -2) else FEATURES
    return REPLICATED if isinstance(placement, Replicate) else PARTIAL if isinstance(placement, Partial) else ANY


def only(layouts: Placements) -> Placement | None:
    """The placement on a 1-D mesh."""
    return layouts[0] if isinstance(layouts, Sequence) else layouts
