"""Decoding: tokens a second on rank 0 of 1, 2, 4 and 8, eager, as a CUDA graph and compiled; waits and graphs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from .. import processes
from ..ranks import joined
from .decoding import Decoder
from .machine import SHARED
from .shapes import checkpoint, load, rank_zero
from .step import MARGIN, Job, Lines

Cell = tuple[int, str]
"""(batch, mode)."""
SHORT: list[Cell] = [(1, "eager"), (1, "graph")]
LONG: list[Cell] = [*SHORT, (8, "graph"), (32, "graph")]
COMPILED: list[Cell] = [(1, "compiled")]
GROUPS: list[tuple[int, str, list[Cell]]] = [
    (1, "ours", LONG),
    (8, "ours", LONG),
    (1, "plain", SHORT),
    (8, "transformers", SHORT),
    (2, "ours", LONG),
    (4, "ours", LONG),
    (8, "ours", COMPILED),
]
"""(ranks, side, cells), by value: each loads a model, since one at a time has the memory."""
MORE_GROUPS: list[tuple[int, str, list[Cell]]] = [
    (1, "ours", COMPILED),
    (1, "plain", COMPILED),
    (1, "plain", LONG[2:]),
    (8, "transformers", LONG[2:]),
    (2, "transformers", SHORT),
    (4, "transformers", SHORT),
]
"""Those of `more_decode`."""
REHEARSED: list[tuple[int, str, list[Cell]]] = [
    (1, "ours", [*SHORT, *COMPILED]),
    (2, "ours", LONG[:3]),
    (2, "transformers", SHORT),
]
RESULT = "tokens/s"
"""Collectives of rank 0 of several return at once, so these speeds are upper bounds."""
SHARING = 2
"""Ranks that share the device, and communicate."""
PROMPT, ROOM, STEPS = 128, 512, 32
COMPILING = 60.0
"""Seconds that a compilation may take."""


def measure(job: Job, lines: Lines) -> None:
    """Ranks that communicate first: copies of a process that does not use the GPU yet. Then each group in turn."""
    folder = checkpoint(job)
    if not job.is_more:
        lines.measure(
            f"{SHARING} ranks that share the device",
            lambda: _sharing(job, folder),
            needs=20.0 * (not job.rehearses),
        )
    groups = MORE_GROUPS if job.is_more else GROUPS
    if job.rehearses:  # the last of those of `more_decode` is compiled nowhere
        groups = MORE_GROUPS[-1:] if job.is_more else REHEARSED
    for size, side, cells in groups:
        _cells(job, lines, folder, side, size, cells)


def _sharing(job: Job, folder: Path) -> dict[str, Any]:
    """Eager steps of ranks on one device, whose collectives take their time; all ranks have the same tokens."""
    results = processes.run_ranks(
        f"{__name__}:sharing",
        {"job": dataclasses.asdict(job), "folder": str(folder), "size": SHARING},
        timeout=min(60.0, job.left - MARGIN),
        env={"LOCAL_RANK": "0", **(SHARED if job.devices < SHARING else {})},
        copy=job.copies,
    )
    if any(result["tokens"] != results[0]["tokens"] for result in results):
        raise ValueError("the ranks have other tokens")
    found = max(results, key=lambda result: result["ms a step"])
    return {name: found[name] for name in ("ms a step", "load, s", "by")}


def sharing(job: dict[str, Any], store: str, folder: str, size: int, rank: int) -> dict[str, Any]:
    """One of the ranks: seconds of a load and of a step, the tokens and the backend."""
    own = Job(**job)
    with joined(store, rank, size, own.kind, own.backend) as mesh:
        began = time.perf_counter()
        model = load("ours", Path(folder), mesh, own)
        loaded = time.perf_counter() - began
        prompt, room, steps = _lengths(own)
        decoder = Decoder(model, own.device, batch=1, prompt=prompt, room=room)
        step = decoder.eager()
        tokens = decoder.tokens(step, steps).tolist()
        seconds = _timed(decoder, step, steps)
    return {"ms a step": seconds * 1e3, "load, s": loaded, "by": own.backend, "tokens": tokens}


def _lengths(job: Job) -> tuple[int, int, int]:
    """Tokens of a prompt and of the cache, and the number of steps."""
    return (8, 32, 4) if job.rehearses else (PROMPT, ROOM, STEPS)


def _cells(job: Job, lines: Lines, folder: Path, side: str, size: int, cells: list[Cell]) -> None:
    """Load a model, and measure each cell."""
    seconds = 0.0 if job.rehearses else COMPILING if cells[0][1] == "compiled" else 10.0
    with rank_zero(job, size) as mesh:
        made: list[Any] = []

        def loaded() -> dict[str, Any]:
            made.append(load(side, folder, mesh, job))
            return {"GB": job.device.allocated() / 1e9}

        lines.measure(f"load {side}, rank 0 of {size}", loaded, needs=seconds)
        for batch, mode in cells if made else ():
            lines.measure(
                f"{side}, rank 0 of {size}, batch {batch}, {mode}",
                lambda batch=batch, mode=mode: decode(made[0], job, batch, mode),
                needs=seconds / 3,
            )
        made.clear()


def decode(model: Any, job: Job, batch: int, mode: str) -> dict[str, Any]:
    """Seconds of a decode step, tokens a second, first tokens that are those of eager steps; waits of the host, graphs.

    The weights are random, so that logits are close to each other: in bf16 another order of sums changes a token.
    """
    device = job.device
    device.forget_peak()
    prompt, room, steps = _lengths(job)
    decoder = Decoder(model, device, batch=batch, prompt=prompt, room=room)
    torch._dynamo.utils.counters.clear()
    eager, step = decoder.eager(), getattr(decoder, mode)()
    expected = decoder.tokens(eager, steps)
    same = (decoder.tokens(step, steps) == expected).all(0).long().cumprod(0).sum().item()
    decoder.prefill()
    seconds = min(_timed(decoder, step, steps) for _ in range(3))
    counters = torch._dynamo.utils.counters
    return {
        "ms a step": seconds * 1e3,
        RESULT: batch / seconds,
        "same": same,
        "steps": steps,
        "waits": device.host_waits(step) if mode == "eager" else None,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "skipped_graphs": counters["inductor"]["cudagraph_skips"],
        "peak, GB": device.peak() / 1e9,
    }


def _timed(decoder: Decoder, step: Any, steps: int) -> float:
    decoder.prefill()
    return decoder.device.seconds(step, steps)
