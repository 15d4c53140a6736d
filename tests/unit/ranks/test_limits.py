"""Cores and memory that a process may use, by files of control groups of both versions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tp_transformers.ranks import limits

V1 = "5:memory:/old\n3:cpu,cpuacct:/old\n1:name=systemd:/\n"
V2 = "0::/outer/inner\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of that of control groups; the groups of this process are in the file "cgroup"."""
    places = {name: tmp_path / Path(name).name for name in ("/proc/self/cgroup", "/proc/meminfo")}
    places["/sys/fs/cgroup"] = tmp_path
    monkeypatch.setattr(limits, "Path", lambda first, *rest: Path(places.get(first, first), *rest))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


QUOTAS = [
    ("", {}, 8),
    (V2, {"outer/inner/cpu.max": "max 100000"}, 8),
    (V2, {"outer/inner/cpu.max": "200000 100000"}, 2),
    (V2, {"outer/inner/cpu.max": "max 100000", "outer/cpu.max": "150000 100000"}, 2),
    (V2, {"outer/inner/cpu.max": "400000 100000", "cpu.max": "50000 100000"}, 1),
    (V2, {"outer/inner/cpu.max": "6400000 100000"}, 8),
    (V2, {"outer/inner/cpu.max": "\n", "outer/cpu.max": "200000 100000"}, 2),  # a sandbox may have files without values
    (V1, {"cpu/old/cpu.cfs_quota_us": "-1", "cpu/old/cpu.cfs_period_us": "100000"}, 8),
    (V1, {"cpu/old/cpu.cfs_quota_us": "300000", "cpu/old/cpu.cfs_period_us": "0"}, 8),
    (V1, {"cpu/old/cpu.cfs_quota_us": "300000", "cpu/old/cpu.cfs_period_us": "100000"}, 3),
    # In a container: the path is that of the host, and the container's group is mounted as the root.
    (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
    (V1 + V2, {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000", "outer/cpu.max": "max 1"}, 5),
]


@pytest.mark.parametrize(("of_process", "files", "cores"), QUOTAS)
def test_cores_follow_quotas(groups, of_process, files, cores) -> None:
    write(groups, {"cgroup": of_process, **files})
    assert limits.visible_cores() == cores


def test_memory_follows_the_least_of_all_groups(groups) -> None:
    assert limits.available_memory() == sys.maxsize, "of a system without /proc"
    write(groups, {"meminfo": "MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:   7000 kB\n"})
    assert limits.available_memory() == 7000 * 1024, "the system's: the process has no groups"
    v1 = {"limit_in_bytes": "9000", "usage_in_bytes": "2000", "stat": "total_inactive_file 500"}
    v2 = {"max": "5000", "current": "1000", "stat": "anon 7\ninactive_file 300"}
    write(groups / "memory/old", {f"memory.{name}": text for name, text in v1.items()})
    write(groups / "outer", {f"memory.{name}": text for name, text in v2.items()})
    write(groups / "outer/inner", {f"memory.{name}": text for name, text in {**v2, "max": "max"}.items()})
    for of_process, left in ((V1, 7500), (V2, 4300), (V1 + V2, 4300)):
        write(groups, {"cgroup": of_process})
        assert limits.available_memory() == left
