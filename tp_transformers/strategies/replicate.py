"""Parameters that every rank holds whole."""

from __future__ import annotations

from .base import TensorParallelLayer


class ReplicateParallel(TensorParallelLayer):
    """Every rank holds the whole parameter and computes the whole output from the whole input; no communication.

    x ── A ── xA
    """


class ReplicateSumGradParallel(ReplicateParallel):
    """Every rank holds the whole parameter, but applies it to its own shard of the activations, such as a norm within
    attention heads; so each rank has a part of the gradient (backward: all-reduce).

        xA ── n(xA)
        xB ── n(xB)
    """

    sums_gradients = True
