"""The machine: its description, its limits, and the state of its page cache.

`python -m benchmarks.machine JOB` is one of the processes that read a checkpoint with preadv as fast as possible.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import processes

_CALL = 16 << 20
"""Bytes per read call."""

_ROUNDS = 3
"""Measurements of a limit for each page size; the best counts."""


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


def limits(files: Sequence[Path], ranks: int, *, cold: bool, timeout: float) -> dict[str, float]:
    """Bytes per second at which `ranks` processes together read `files` by preadv, each its part; best of three rounds.

    "fresh": into untouched memory, including its page faults, as in a load; "huge": the same with huge pages on
    request; "touched": into memory that is already mapped. Reads at most a third of the available memory. With `cold`,
    "fresh" and "huge" read from storage.
    """
    total = min(sum(file.stat().st_size for file in files), _meminfo("MemAvailable") // 3)
    best: dict[str, float] = {}
    for huge in (False, True) * _ROUNDS:
        if cold:
            drop(files)
        begin = time.monotonic() + 1
        jobs = [
            {
                "files": [str(file) for file in files],
                "part": [total * rank // ranks, total * (rank + 1) // ranks],
                "huge": huge,
                "begin": begin,
            }
            for rank in range(ranks)
        ]
        results = processes.run("benchmarks.machine", jobs, timeout=timeout)
        for name, key in (("fresh", "huge" if huge else "fresh"), ("touched", "touched")):
            best[key] = max(best.get(key, 0.0), total / max(result[name] for result in results))
    return best


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


def main() -> None:
    """Read a part of some files into fresh memory, then into the same memory again; write the seconds of both."""
    job = json.loads(sys.argv[1])
    start, stop = job["part"]
    mapped = mmap.mmap(-1, max(stop - start, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if job["huge"]:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapped)
    pieces = []
    offset = 0
    for name in job["files"]:
        file = os.open(name, os.O_RDONLY)
        size = os.fstat(file).st_size
        first, last = max(start, offset), min(stop, offset + size)
        pieces += [
            (file, at - offset, memory[at - start : min(at + _CALL, last) - start]) for at in range(first, last, _CALL)
        ]
        offset += size
    result = {}
    time.sleep(max(0.0, job["begin"] - time.monotonic()))
    for name in ("fresh", "touched"):
        began = time.perf_counter()
        for file, at, target in pieces:
            _read(file, at, target)
        result[name] = max(time.perf_counter() - began, 1e-9)
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def _read(file: int, offset: int, target: memoryview) -> None:
    while target:
        count = os.preadv(file, [target], offset)
        if not count:
            raise EOFError(f"file descriptor {file} ends before {offset + len(target)}")
        offset, target = offset + count, target[count:]


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


if __name__ == "__main__":
    main()
