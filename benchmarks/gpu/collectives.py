"""Sums over ranks on GPUs: microseconds by bytes, and whether they are correct."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from .. import processes
from .machine import SHARED
from .reckoned import Gpu
from .step import MARGIN, Job, Lines

NBYTES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
LIMIT = 40.0
"""Seconds for the ranks."""


def measure(job: Job, lines: Lines) -> None:
    """The backend's sums, on all GPUs; on two ranks where there is one."""
    size = max(torch.cuda.device_count() if job.kind == "cuda" else 2, 2)
    lines.measure(f"{size} ranks", lambda: _ranks(job, size), needs=LIMIT / 4)


def _ranks(job: Job, size: int) -> dict[str, Any]:
    env = SHARED if job.backend == "nccl" else {}
    with tempfile.TemporaryDirectory() as scratch:
        shared = {"kind": job.kind, "backend": job.backend, "store": f"{scratch}/store", "size": size}
        results = processes.run(
            "benchmarks.gpu.summing",
            [{**shared, "nbytes": NBYTES[:2] if job.rehearses else NBYTES, "rank": rank} for rank in range(size)],
            timeout=min(LIMIT, job.left - MARGIN),
            env=[{**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)],
        )
    slowest = {nbytes: max(result["seconds"][nbytes] for result in results) for nbytes in results[0]["seconds"]}
    return {"ranks": size, "backend": job.backend, "seconds": slowest}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Microseconds by bytes."""
    rows = [f"| ranks | {' | '.join(f'{nbytes >> 10} KB' for nbytes in NBYTES)} |", "| --- " * (len(NBYTES) + 1) + "|"]
    for line in lines:
        if "seconds" in line:
            shown = [f"{line['seconds'][str(n)] * 1e6:.0f} us" if str(n) in line["seconds"] else "-" for n in NBYTES]
            rows.append(f"| {line['what']}, {line['backend']} | {' | '.join(shown)} |")
    return rows


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """Processes that start."""
    return [("sums", gpu.start)]
