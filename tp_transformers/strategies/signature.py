"""The signature of a strategy: how activations lie over the ranks before and after its module."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.distributed.tensor import Partial, Placement, Replicate, Shard


class State(Enum):
    """How a tensor lies over the ranks, in DTensor's words; activations are (batch, sequence, features)."""

    ANY = "any"
    """As it comes; the strategy does not say."""
    REPLICATED = "Replicate()"
    FEATURES = "Shard(-1)"
    SEQUENCE = "Shard(1)"
    BATCH = "Shard(0)"
    """Samples of each rank's own."""
    LOCAL = "Shard()"
    """A shard of features, heads or tokens, on which each rank computes by itself."""
    PARTIAL = "Partial()"
    """Each rank has a tensor of the full shape; their sum is the value."""


ANY, REPLICATED, FEATURES, SEQUENCE, BATCH, LOCAL, PARTIAL = State


@dataclass(frozen=True)
class Signature:
    """What arrives at a module, what leaves it, and what lies between.

    colwise           REPLICATED -> FEATURES
    rowwise           FEATURES   -> PARTIAL, summed -> REPLICATED
    local_rowwise     FEATURES   -> PARTIAL
    gather            REPLICATED -> modules of the block: PARTIAL, summed -> REPLICATED
    sequence_gather   SEQUENCE   -> REPLICATED -> modules of the block: PARTIAL, summed -> SEQUENCE
    """

    takes: State = ANY
    leaves: State = ANY
    inside: tuple[State, State] | None = None
    """What the module's own forward is given, and what it leaves, where that differs; of a block, its modules."""
    gradient: State = REPLICATED
    """PARTIAL if every rank has a part of the gradient of replicated parameters (backward: all-reduce)."""

    @property
    def sums(self) -> bool:
        """True if partial results of the ranks are added up."""
        return self.inside is not None and self.inside[1] is PARTIAL and self.leaves is not PARTIAL

    @property
    def cuts_sequence(self) -> bool:
        """True if the next modules compute on shards of the sequence."""
        return self.leaves is SEQUENCE and self.takes is not SEQUENCE

    @property
    def joins_sequence(self) -> bool:
        """True for a block that gathers the sequence, and leaves this rank's shard of its output."""
        return self.takes is SEQUENCE and self.inside is not None and self.inside[0] is REPLICATED

    @property
    def gathers_batch(self) -> bool:
        """True for a block that every rank computes in full, on the samples of all ranks."""
        return self.takes is BATCH and self.inside == (REPLICATED, REPLICATED)

    @property
    def computes_locally(self) -> bool:
        """True for a module with a forward that itself computes on features or heads which are cut."""
        return self.inside == (LOCAL, LOCAL)

    @property
    def exchanges_tokens(self) -> bool:
        """True for experts that are sent the tokens of other ranks, where each rank has tokens of its own."""
        return self.inside == (LOCAL, PARTIAL)


def state_of(placement: Placement | None) -> State:
    """The state of activations, (batch, sequence, features), with a DTensor's placement on the `tp` axis."""
    if isinstance(placement, Shard):
        return BATCH if placement.dim in (0, -3) else SEQUENCE if placement.dim in (1, -2) else FEATURES
    return REPLICATED if isinstance(placement, Replicate) else PARTIAL if isinstance(placement, Partial) else ANY
