"""Cores and memory that this process may use, by its affinity and by the limits of its control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

_FILES = {
    ("cpu", 1): ("cpu.cfs_quota_us", "cpu.cfs_period_us"),  # microseconds of all cores together in each period
    ("cpu", 2): ("cpu.max",),
    ("memory", 1): ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    ("memory", 2): ("memory.max", "memory.current", "memory.stat"),
}
"""Files of a control group, by controller and version; those of both versions have the same words."""


def visible_cores() -> int:
    """Number of cores that this process may use; a quota of 1.5 cores counts as 2."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [(int(quota), int(period)) for quota, period in _groups("cpu") if quota.isdecimal()]  # "max", or -1
    return max(1, min(allowed, *(ceil(quota / period) for quota, period in quotas if period), sys.maxsize))


def available_memory() -> int:
    """Bytes of CPU memory that the system and the control groups leave, without swapping; `sys.maxsize` if unknown."""
    return min(_available(), *_left_in_groups(), sys.maxsize)


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _left_in_groups() -> Iterator[int]:
    """Bytes left in each control group with a limit, where pages of files that can be dropped are free."""
    for limit, used, *statistics in _groups("memory"):
        entries = dict(zip(statistics[::2], statistics[1::2], strict=False))
        cached = entries.get("total_inactive_file") or entries.get("inactive_file", "0")  # version 1 has both
        if limit.isdecimal():  # "max"
            yield max(0, min(int(limit), int(limit) - int(used) + int(cached)))


def _groups(controller: str) -> Iterator[list[str]]:
    """The words of the files of each control group of this process, and of the groups around it.

    In a container the path of a group of version 1 is often that outside, and only the mounted root exists.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            group = root / path.lstrip("/")
            for folder in (each for each in (group, *group.parents) if each.is_relative_to(root)):
                with suppress(OSError):
                    files = [(folder / name).read_text() for name in _FILES[controller, 1 if controllers else 2]]
                    if all(map(str.strip, files)):  # a sandbox may have empty ones
                        yield " ".join(files).split()
