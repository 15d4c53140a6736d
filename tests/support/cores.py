"""Cores of the processes of a parallel run of tests."""

from __future__ import annotations

import contextlib
import os

ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Cores of the run; none where the system does not let a process choose."""


def take_own() -> None:
    """Give this process, with the ranks that it will start, cores that no other process of the run has.

    Ranks wait for one another in every collective, and longer if another process' ranks compute in between.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if 1 < count <= len(ALL):
        index = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        with contextlib.suppress(OSError):  # where a process may not choose, all have all cores
            os.sched_setaffinity(0, ALL[index::count])
