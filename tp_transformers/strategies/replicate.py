"""Replicated parameters."""

from __future__ import annotations

from .base import TensorParallelLayer
from .signature import LOCAL, PARTIAL, Signature


class ReplicateParallel(TensorParallelLayer):
    """Every rank holds the full parameter and computes the full output from the full input; no communication.

    x ── A ── xA
    """

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        return ReplicateParallel(), ReplicateParallel()


class ReplicateSumGradParallel(ReplicateParallel):
    """Every rank holds the full parameter, but applies it to its own shard of the activations, such as a norm within
    attention heads; so the gradients are partial sums (backward: all-reduce).

        xA ── n(xA)
        xB ── n(xB)
    """

    signature = Signature(LOCAL, LOCAL, gradient=PARTIAL)

    def adapter(self) -> tuple[TensorParallelLayer, TensorParallelLayer]:
        """See `TensorParallelLayer.adapter`: both matrices compute on this rank's activations."""
        return ReplicateSumGradParallel(), ReplicateSumGradParallel()
