"""What a step of training takes: seconds by part, memory, a share of a GPU's arithmetic; as a log and a picture."""

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
"""Dense bf16 operations a second, by what a GPU's name contains; the first that fits counts."""


class Stopwatch:
    """Seconds by part of a step: `mark(part)` says what has run since the mark before it.

    On a GPU marks are events in its stream, which are read once a step, so that measuring does not hold it up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._noted: Any = None
        self._marks: list[tuple[str, Any]] = []
        self.lap()

    def mark(self, part: str) -> None:
        """What has run since the last mark is `part`."""
        self._marks.append((part, self._now()))

    def note(self, *_: Any) -> None:
        """A place that `mark_around_note` may cut at: the last one counts."""
        self._noted = self._now()

    def mark_around_note(self, before: str, after: str) -> None:
        """What ran until the last `note` is `before`, and what has run since `after`; all is `before` without one."""
        if self._noted is not None:
            self._marks.append((before, self._noted))
            self._noted = None
            before = after
        self.mark(before)

    def lap(self) -> dict[str, float]:
        """Seconds of every part since the last lap, and of all of them as "step"; begins the next one."""
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
    """Bytes: the most that tensors took on the GPU, or that was resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def operations_per_token(parameters: int, config: Any, length: int) -> float:
    """Floating-point operations of a forward and its backward: 6 a parameter, and 12 a layer, feature and position.

    As PaLM counts them (https://arxiv.org/abs/2204.02311, appendix B): attention as if it were not causal, nothing
    for what gradient checkpointing computes again. `parameters` are those that multiply: an embedding counts only
    where it is the output's too. For dense models.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * parameters + 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * length


def peak_operations(name: str) -> float | None:
    """Operations a second of the GPU of that name in bf16; None where it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Log:
    """A file of JSON lines: one about the run, then one a step."""

    def __init__(self, path: Path, about: dict[str, Any], first: int) -> None:
        """Begin it, or go on with it at the step `first`: what it says of that one and later ones is dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line.get("step", 0) < first] if first > 1 else []
        path.write_text("".join(json.dumps(line) + "\n" for line in [*kept, {"run": about}]), encoding="utf-8")
        self._path = path

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, at once."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All its lines; none where there is no log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def draw_loss(log: Path, picture: Path) -> bool:
    """Draw the loss of every step of a log to a PNG; returns False, and draws nothing, without matplotlib."""
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
