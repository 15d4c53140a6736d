"""Loading 16 GB: warm and cold, against transformers' tensor parallelism, and safetensors' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import checkpoints, machine
from ..sides import Setting, Side
from .shapes import checkpoint
from .step import MARGIN, Job, Lines

SIZES = (8, 2)
"""Numbers of ranks; rank 0 loads."""
RESULT = "s"
SIDES = {"ours": "tp_transformers", "native": "transformers"}


def measure(job: Job, lines: Lines) -> None:
    """Warm loads first, then those from storage."""
    folder = checkpoint(job)
    files = checkpoints.files(folder)
    for cold in (False, True):
        for size in SIZES[1:] if cold else SIZES:
            for side in SIDES:
                what = f"{side}, rank 0 of {size}, {'cold' if cold else 'warm'}"
                lines.measure(
                    what,
                    lambda side=side, size=size, cold=cold: _load(job, folder, side, size, cold),
                    needs=15.0 * (not job.rehearses),
                )
    lines.measure("safetensors to the device, all bytes", lambda: _read(job, files))


def _load(job: Job, folder: Path, side: str, size: int, cold: bool) -> dict[str, Any]:
    files = checkpoints.files(folder)
    try:
        (machine.drop if cold else machine.warm)(files)
    except OSError as error:  # a file system in memory, or a kernel that does not say which pages are there
        return {"skipped": str(error)}
    (found,) = _setting(job, size).run("time", Side(SIDES[side], side, folder), folder)
    report, shard = found.get("report", {}), found["shard"]
    return {
        "s": found["load"],
        "first forward, s": found["forward"],
        "shard, GB": shard / 1e9,
        "GB/s": shard / found["load"] / 1e9,
        "device beyond the shard, MB": (found.get("device_peak", shard) - shard) / 1e6,
        "host, MB": (found["anon_peak"] - found["anon_start"]) / 1e6,
        "report": report.get("text", "-"),
    }


def _read(job: Job, files: list[Path]) -> dict[str, Any]:
    """Bytes a second of safetensors' `get_tensor` to the device, each tensor freed before the next."""
    machine.warm(files)
    (found,) = _setting(job, 1).run("read", Side("safetensors", "native", files[0].parent), files[0].parent)
    return {"s": found["load"], "GB": found["bytes"] / 1e9, "GB/s": found["bytes"] / found["load"] / 1e9}


def _setting(job: Job, size: int) -> Setting:
    return Setting(size, 0, job.kind, job.left - MARGIN, Path(job.folder), copies=job.copies)
