"""A training step on rank 0 of 8: tokens a second, share of the GPU's peak, memory, and where the time goes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..meters import operations_per_token, peak_operations
from ..ranks import prompts
from ..train_llm import multiplied
from .shapes import checkpoint, load, rank_zero
from .step import Job, Lines

SIZE, LENGTH, STEPS = 8, 4096, 3
"""Ranks, tokens of the batch's only sequence, timed steps."""
RESULT = "tokens/s"
"""Collectives return at once, so speeds are upper bounds."""
TRACE = "train-trace.json.gz"


def measure(job: Job, lines: Lines) -> None:
    """Ours, then transformers'."""
    folder = checkpoint(job)
    for side in ("ours", "transformers"):
        with rank_zero(job, SIZE) as mesh:
            lines.measure(
                f"{side}, rank 0 of {SIZE}",
                lambda side=side, mesh=mesh: train(load(side, folder, mesh, job), side, job),
                needs=20.0 * (not job.rehearses),
            )


def train(model: Any, side: str, job: Job) -> dict[str, Any]:
    """Steps of AdamW over one sequence in bf16; the last is profiled."""
    device, length = job.device, 32 if job.rehearses else LENGTH
    model.train()
    ids = prompts(model.config.vocab_size, 1, length).to(job.kind)
    # transformers shards some parameters as DTensors, which torch's kernel does not take together with others.
    params = sorted(model.parameters(), key=lambda param: isinstance(param, DTensor))
    groups = [{"params": list(found)} for _, found in groupby(params, key=lambda param: isinstance(param, DTensor))]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, foreach=False, fused=True)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    device.forget_peak()
    seconds = device.seconds(step, STEPS)
    peak, top = device.peak(), _profile(step, job, Path(job.out, TRACE) if side == "ours" else None)
    operations = operations_per_token(multiplied(model), model.config, length)
    limit = peak_operations(device.name())
    return {
        "s": seconds,
        RESULT: length / seconds,
        "MFU": length / seconds * operations / SIZE / limit if limit else "-",
        "peak, GB": peak / 1e9,
        "waits of the host": device.host_waits(step),
        "ms and calls of operators": top,
    }


def _profile(step: Any, job: Job, trace: Path | None) -> str:
    """Lines of the operators that take the most of a step; a trace for chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        job.device.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    name = "self_device_time_total" if job.kind == "cuda" else "self_cpu_time_total"
    kind = torch.autograd.DeviceType.CUDA if job.kind == "cuda" else torch.autograd.DeviceType.CPU
    found = [event for event in profiler.key_averages() if event.device_type == kind]  # kernels, not their callers too
    events = sorted(found, key=lambda event: getattr(event, name), reverse=True)
    return "".join(f"{getattr(event, name) / 1e3:10.2f} {event.count:6} {event.key[:60]}\n" for event in events[:12])
