"""Cores and memory that this process may use, by its affinity and by the quotas of its control groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

_QUOTAS = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
"""Microseconds of all cores together in each period: the files of a control group of version 1."""
_MEMORY = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
"""Limit, usage and cached pages of a control group of version 1."""
_MEMORY_V2 = ("max", "current", "inactive_file")


def visible_cores() -> int:
    """Number of cores that this process may use; a quota of 1.5 cores counts as 2."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, *(ceil(quota) for quota in _quotas()), sys.maxsize))


def available_memory() -> int:
    """Bytes of CPU memory that the system and the control groups leave, without swapping; `sys.maxsize` if unknown."""
    return min(_available(), *_left_in_groups(), sys.maxsize)


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return sys.maxsize


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The control groups of this process, with those around each, and whether they are of version 2.

    In a container the path of a group of version 1 is often that outside, and only the mounted root exists.
    """
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if not controllers or controller in controllers.split(","):
            root = Path("/sys/fs/cgroup", controller if controllers else "")
            group = root / path.lstrip("/")
            yield from ((folder, not controllers) for folder in (group, *group.parents) if folder.is_relative_to(root))


def _quotas() -> Iterator[float]:
    """Cores that each control group with a quota may use."""
    for group, is_v2 in _groups("cpu"):
        try:
            files = ("cpu.max",) if is_v2 else _QUOTAS
            quota, period = (int(word) for name in files for word in (group / name).read_text().split())
        except (OSError, ValueError):  # "max 100000"
            continue
        if quota > 0 and period > 0:  # -1: no quota
            yield quota / period


def _left_in_groups() -> Iterator[int]:
    """Bytes left in each control group with a limit, where pages of files that can be dropped are free."""
    for group, is_v2 in _groups("memory"):
        limit, usage, cached = _MEMORY_V2 if is_v2 else _MEMORY
        try:
            room, used = (int((group / f"memory.{name}").read_text()) for name in (limit, usage))
            entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, min(room, room - used + int(entries[cached])))
        except (OSError, ValueError, KeyError):  # "max"
            continue
