"""Decoding: tokens a second on rank 0 of 1, 2, 4 and 8, eager, as a CUDA graph and compiled; waits and graphs."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .. import processes
from ..ranks import joined
from ..report import head
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
    with tempfile.TemporaryDirectory() as scratch:
        results = processes.run_ranks(
            f"{__name__}:sharing",
            {"job": dataclasses.asdict(job), "store": f"{scratch}/store", "folder": str(folder), "size": SHARING},
            timeout=min(60.0, job.left - MARGIN),
            env={"LOCAL_RANK": "0", **(SHARED if job.devices < SHARING else {})},
            copy=job.copies,
        )
    if any(result["tokens"] != results[0]["tokens"] for result in results):
        raise ValueError("the ranks have other tokens")
    found = max(results, key=lambda result: result["seconds"])
    return {key: found[key] for key in ("seconds", "load", "backend")}


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
    return {"load": loaded, "tokens": tokens, "backend": own.backend, "seconds": seconds}


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
            return {"bytes": job.device.allocated()}

        lines.measure(f"load {side}, rank 0 of {size}", loaded, needs=seconds)
        for batch, mode in cells if made else ():
            cell = {"side": side, "ranks": size, "batch": batch, "mode": mode}
            lines.measure(
                f"{side}, rank 0 of {size}, batch {batch}, {mode}",
                lambda cell=cell: {**cell, **decode(made[0], job, cell["batch"], cell["mode"])},
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
        "seconds": seconds,
        "tokens_per_second": batch / seconds,
        "same": same,
        "steps": steps,
        "waits": device.host_waits(step) if mode == "eager" else None,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "skipped_graphs": counters["inductor"]["cudagraph_skips"],
        "peak": device.peak(),
    }


def _timed(decoder: Decoder, step: Any, steps: int) -> float:
    decoder.prefill()
    return decoder.device.seconds(step, steps)


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Tokens a second by side, ranks, batch and mode; the gain over one rank."""
    found = [line for line in lines if "tokens_per_second" in line]
    rows = head("side", "ranks", "batch", "mode", "ms a step", "tokens a second", "by 1 rank", "waits", "graphs")
    alone = {(line["side"], line["batch"], line["mode"]): line["seconds"] for line in found if line["ranks"] == 1}
    for line in found:
        one = alone.get(("ours" if line["side"] == "ours" else "plain", line["batch"], line["mode"]))
        gain = f"{one / line['seconds']:.2f}" if one else "-"
        rows.append(
            f"| {line['side']} | {line['ranks']} | {line['batch']} | {line['mode']} | {line['seconds'] * 1e3:.2f} | "
            f"{line['tokens_per_second']:.0f} | {gain} | {line['waits']} | {line['graphs']} |"
        )
    rows += ["", "Rank 0 of several; collectives return at once, so these times are lower bounds.", ""]
    for line in lines:
        if "backend" in line:
            rows.append(f"- {line['what']}, by {line['backend']}: {line['seconds'] * 1e3:.2f} ms an eager step")
    other = [line for line in found if line["same"] < line["steps"]]
    return rows + [f"- {line['what']}: {line['same']} of {line['steps']} tokens as in eager steps" for line in other]


def result(lines: list[dict[str, Any]]) -> str:
    """Tokens a second, batch 1, of the fastest mode of each side and number of ranks."""
    best: dict[str, float] = {}
    for line in lines:
        if "tokens_per_second" in line and line["batch"] == 1:
            name = f"{line['side']} {line['ranks']}"
            best[name] = max(best.get(name, 0.0), line["tokens_per_second"])
    return ", ".join(f"{name}: {speed:.0f} tokens/s" for name, speed in best.items())
