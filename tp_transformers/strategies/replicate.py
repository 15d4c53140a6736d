"""Parameters that every rank holds whole."""

from __future__ import annotations

from .base import TensorParallelLayer


class ReplicateParallel(TensorParallelLayer):
    """Every rank holds the whole parameter and computes the whole output from the whole input; no communication.

    x ── A ── xA
    """
