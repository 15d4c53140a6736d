"""More of `decode`: other sides compiled, in batches, and on other numbers of ranks."""

from __future__ import annotations

from .decode import MORE, measure_groups, reckon_groups
from .decode import result as result
from .decode import table as table
from .reckoned import Gpu
from .shapes import checkpoint
from .step import Job, Lines


def measure(job: Job, lines: Lines) -> None:
    """The groups; a rehearsal takes the last, which is compiled nowhere."""
    measure_groups(job, lines, checkpoint(job), MORE[-1:] if job.rehearses else MORE)


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """A context, and the groups."""
    return [("context", gpu.context), *reckon_groups(gpu, MORE)]
