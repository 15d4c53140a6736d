"""The tests in tests/gpu that only `make test-all` runs: more shapes, formats, modes and faults, on this device."""

from __future__ import annotations

from .reckoned import Gpu
from .step import Job, Lines
from .tests import result as result
from .tests import run
from .tests import table as table


def measure(job: Job, lines: Lines) -> None:
    """The slow ones; a rehearsal has run its test."""
    if not job.rehearses:
        run(job, lines, "slow")


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """Twice as many as the quick ones."""
    return [
        ("pytest", gpu.start),
        ("the pool", gpu.start + gpu.context),
        ("ranks of faults", 3 * gpu.start),
        ("tests", 200.0),
    ]
