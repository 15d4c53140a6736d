"""Loading 16 GB: warm and cold, against transformers' tensor parallelism, and safetensors' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import checkpoints, machine
from ..report import head
from ..sides import Setting, Side
from .shapes import checkpoint
from .step import MARGIN, Job, Lines

SIZES = (8, 2)
"""Numbers of ranks; rank 0 loads."""
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
    report = found.get("report", {})
    return {
        "side": side,
        "ranks": size,
        "cold": cold,
        "shard": found["shard"],
        "load": found["load"],
        "forward": found["forward"],
        "host_peak": found["anon_peak"] - found["anon_start"],
        "device_peak": found.get("device_peak", found["shard"]),
        "read": report.get("bytes_read", 0),
        "text": report.get("text", ""),
    }


def _read(job: Job, files: list[Path]) -> dict[str, Any]:
    """Bytes a second of safetensors' `get_tensor` to the device, each tensor freed before the next."""
    machine.warm(files)
    (found,) = _setting(job, 1).run("read", Side("safetensors", "native", files[0].parent), files[0].parent)
    return {"load": found["load"], "bytes": found["bytes"], "speed": found["bytes"] / found["load"]}


def _setting(job: Job, size: int) -> Setting:
    return Setting(size, 0, job.kind, job.left - MARGIN, Path(job.folder), copies=job.copies)


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Seconds, GB a second of the shard, and bytes beyond it on host and device."""
    rows = head("load", "seconds", "shard", "GB/s", "device beyond the shard", "host")
    for line in lines:
        if "shard" in line:
            beyond = (line["device_peak"] - line["shard"]) / 1e6
            rows.append(
                f"| {line['what']} | {line['load']:.2f} | {line['shard'] / 1e9:.2f} GB | "
                f"{line['shard'] / line['load'] / 1e9:.2f} | {beyond:.0f} MB | {line['host_peak'] / 1e6:.0f} MB |"
            )
        elif "speed" in line:
            speed = f"{line['bytes'] / 1e9:.2f} GB | {line['speed'] / 1e9:.2f}"
            rows.append(f"| {line['what']} | {line['load']:.2f} | {speed} | | |")
    return rows


def result(lines: list[dict[str, Any]]) -> str:
    """Seconds of the loads."""
    return ", ".join(
        f"{line['what'].replace(', rank 0', '')}: {line['load']:.2f} s" for line in lines if "shard" in line
    )
