"""The machine: its description, and the state of its page cache."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_CALL = 16 << 20
"""Bytes per read call."""


def facts() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, system, versions and date."""
    processors = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": processors[0].partition(":")[2].strip() if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _meminfo("MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache. Raises OSError if pages stay, since times would not be cold."""
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if left := sum(map(resident, files)):
        raise OSError(f"{left} bytes of {files[0].parent} stay in the page cache; is the folder in memory (tmpfs)?")


def warm(files: Sequence[Path]) -> None:
    """Read files into the page cache. Raises OSError if it does not keep all of them, since times would not be warm."""
    for file in files:
        if resident(file) < file.stat().st_size:
            with file.open("rb") as opened:
                while opened.read(_CALL):
                    pass
    if any(resident(file) < file.stat().st_size for file in files):
        raise OSError(f"the page cache does not hold all of {files[0].parent}; ask for fewer gigabytes")


def resident(file: Path) -> int:
    """Bytes of a file in the page cache: complete pages, truncated at the end of the file."""
    size = file.stat().st_size
    if not size:
        return 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start  # the map cannot be closed while something points into it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return min(sum(page & 1 for page in pages.raw) * mmap.PAGESIZE, size)


def _meminfo(name: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith(f"{name}:"))


def _chosen(path: str) -> str:
    """The selected (bracketed) value of a kernel setting; "" if there is none."""
    try:
        return Path(path).read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except FileNotFoundError:
        return ""


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()
