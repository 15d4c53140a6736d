"""The checkpoint of the other steps, written while a step that does not need it runs."""

from __future__ import annotations

from .shapes import checkpoint
from .step import Job, Lines


def measure(job: Job, lines: Lines) -> None:
    """Write it."""
    lines.measure("checkpoint", lambda: {"folder": str(checkpoint(job))})
