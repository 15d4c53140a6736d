"""Loading 16 GB: warm and cold, against transformers' tensor parallelism, and safetensors' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from .. import checkpoints, machine
from ..sides import Setting, Side
from .reckoned import Gpu
from .shapes import checkpoint
from .step import MARGIN, Job, Lines

SIZES = (8, 2)
"""Numbers of ranks; rank 0 loads."""
SIDES = {"ours": "tp_transformers", "native": "transformers"}


def measure(job: Job, lines: Lines) -> None:
    """Warm loads first, then those from storage."""
    folder = checkpoint(job)
    files = checkpoints.files(folder)
    lines.measure("safetensors to the device, all bytes", lambda: _safetensors(job, files))
    for cold in (False, True):
        for size in SIZES[1:] if cold else SIZES:
            for side in SIDES:
                what = f"{side}, rank 0 of {size}, {'cold' if cold else 'warm'}"
                lines.measure(
                    what,
                    lambda side=side, size=size, cold=cold: _load(job, folder, side, size, cold),
                    needs=15.0 * (not job.rehearses),
                )


def _load(job: Job, folder: Path, side: str, size: int, cold: bool) -> dict[str, Any]:
    files = checkpoints.files(folder)
    try:
        (machine.drop if cold else machine.warm)(files)
    except OSError as error:  # a file system in memory, or a kernel that does not say which pages are there
        return {"skipped": str(error)}
    setting = Setting(size, 0, job.kind, job.left - MARGIN, Path(job.folder))
    (found,) = setting.run("time", Side(SIDES[side], side, folder), folder)
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


def _safetensors(job: Job, files: list[Path]) -> dict[str, Any]:
    """Bytes a second of `get_tensor` to the device, each tensor freed before the next."""
    machine.warm(files)
    total = 0

    def read() -> None:
        nonlocal total
        for file in files:
            with safe_open(file, framework="pt", device=job.kind) as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    total += opened.get_tensor(name).nbytes

    seconds = job.device.seconds(read, 1)
    return {"load": seconds, "bytes": total, "speed": total / seconds}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Seconds, GB a second of the shard, and bytes beyond it on host and device."""
    rows = ["| load | seconds | shard | GB/s | device beyond the shard | host |", "| --- " * 6 + "|"]
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


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """Processes that start, and bytes by the slowest of bus, page cache and storage."""
    warm = [2 * (gpu.start + gpu.load(gpu.weights / size)) for size in SIZES]
    cold = 2 * (gpu.start + gpu.weights / SIZES[1] / gpu.disk)
    return [("safetensors", gpu.weights / gpu.cached), ("warm", sum(warm)), ("cold", cold)]
