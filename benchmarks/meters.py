"""Measure training steps: seconds by phase, memory, FLOPs utilisation of a GPU; as a log and a chart."""

from __future__ import annotations

import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense bf16 operations per second, by a substring of the GPU's name; the first match counts."""


class Stopwatch:
    """Seconds by phase of a step: `mark(part)` names the phase since the previous mark.

    On a GPU marks are events in its stream, which are read once per step, so that measuring does not stall it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []
        self.lap()

    def mark(self, part: str) -> None:
        """Name the phase since the last mark `part`."""
        self._marks.append((part, self._now()))

    def lap(self) -> dict[str, float]:
        """Seconds of every phase since the last lap, and their sum as "step"; begins the next lap."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self._marks):
            taken = begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
            seconds[part] = seconds.get(part, 0.0) + taken
        self._marks = [("", self._now())]
        return {**seconds, "step": sum(seconds.values())}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory(device: torch.device) -> int:
    """Peak bytes of tensors on the GPU, or of this process' resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def operations_per_token(parameters: int, config: Any, length: int) -> float:
    """FLOPs per token of a forward and backward: 6 per parameter, and 12 per layer, feature and position.

    As in PaLM (https://arxiv.org/abs/2204.02311, appendix B): attention counts as not causal, recomputation by gradient
    checkpointing does not count. `parameters`: those in matrix products; an embedding counts only if it is tied to the
    output. For dense models.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * parameters + 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * length


def peak_operations(name: str) -> float | None:
    """Peak bf16 operations per second of the GPU of that name; None if unknown."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Log:
    """A file of JSON lines: one about the run, then one per step."""

    def __init__(self, path: Path, about: dict[str, Any], first: int) -> None:
        """Start a log, or resume it at the step `first`; existing lines from that step on are dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line.get("step", 0) < first] if first > 1 else []
        path.write_text("".join(json.dumps(line) + "\n" for line in [*kept, {"run": about}]), encoding="utf-8")
        self._path = path

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and flush."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log; none if there is no log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def draw_loss(log: Path, picture: Path) -> bool:
    """Plot the loss of every step of a log to a PNG; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [line for line in read_log(log) if "step" in line]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="#2f6fb7", linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    return True
