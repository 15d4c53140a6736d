"""Sums over ranks on GPUs: microseconds by bytes, and whether each way sums correctly."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tp_transformers.ranks.all_reduce.transport import VALUES, VARIABLE

from .. import processes
from .machine import SHARED
from .reckoned import Gpu
from .step import MARGIN, Job, Lines

NBYTES = (8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20)
LIMIT = 40.0
"""Seconds for the ranks of one way."""


def measure(job: Job, lines: Lines) -> None:
    """Each way in processes of its own, since one that hangs leaves a stream that is of no use."""
    count = torch.cuda.device_count() if job.kind == "cuda" else 2
    ways = VALUES[:2] if job.rehearses else VALUES if count > 1 else VALUES[:1]
    if len(ways) == 1:
        lines.write({"what": "other ways than the backend", "skipped": "they need two GPUs"})
    for way in ways:
        lines.measure(f"{way}, {max(count, 2)} ranks", lambda way=way: _ranks(job, way, max(count, 2)), needs=LIMIT / 4)


def _ranks(job: Job, way: str, size: int) -> dict[str, Any]:
    env = {VARIABLE: way, **(SHARED if job.backend == "nccl" else {})}
    with tempfile.TemporaryDirectory() as scratch:
        shared = {"kind": job.kind, "backend": job.backend, "store": f"{scratch}/store", "size": size}
        results = processes.run(
            "benchmarks.gpu.summing",
            [{**shared, "nbytes": NBYTES[:2] if job.rehearses else NBYTES, "rank": rank} for rank in range(size)],
            timeout=min(LIMIT, job.left - MARGIN),
            env=[{**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)],
        )
    slowest = {nbytes: max(result["seconds"][nbytes] for result in results) for nbytes in results[0]["seconds"]}
    return {"way": way, "ranks": size, "backend": job.backend, "seconds": slowest, "used": results[0]["used"]}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Microseconds by bytes."""
    rows = [f"| way | {' | '.join(f'{nbytes >> 10} KB' for nbytes in NBYTES)} |", "| --- " * (len(NBYTES) + 1) + "|"]
    for line in lines:
        if "seconds" in line:
            shown = [f"{line['seconds'][str(n)] * 1e6:.0f} us" if str(n) in line["seconds"] else "-" for n in NBYTES]
            rows.append(f"| {line['what']}, {', '.join(line['used']) or line['backend']} | {' | '.join(shown)} |")
    return rows


def reckon(gpu: Gpu) -> list[tuple[str, float]]:
    """Processes that start: one GPU has one way."""
    return [("a way", gpu.start)]
