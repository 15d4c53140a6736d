"""The minutes of each step, reckoned from bytes and operations before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU with its machine."""

    name: str
    memory: float
    """Bytes per second that a kernel reads."""
    operations: float
    """Operations per second of a matrix product in bf16."""
    to_device: float
    """Bytes per second from pinned memory."""
    cached: float = 8e9
    """Bytes per second from the page cache to pinned memory, by several threads."""
    disk: float = 1.5e9
    """Bytes per second from storage, and to it."""
    start: float = 12.0
    """Seconds in which a process imports torch and transformers, and creates its context."""
    launches: float = 8e-3
    """Seconds of the kernels' launches of an eager decode step of 32 layers."""
    weights: float = 16.1e9
    """Bytes of the model."""
    parameters: float = 8.03e9

    def load(self, nbytes: float) -> float:
        """Seconds of a load of `nbytes` from the page cache, the model's construction included."""
        return 2.0 + nbytes / min(self.to_device, self.cached)


H200 = Gpu("H200", memory=4.3e12, operations=700e12, to_device=50e9)
"""Products of large matrices and copies as measured on one; NVIDIA states 4.8e12 and 989e12."""


def table(parts: Mapping[str, Iterable[tuple[str, float]]], gpu: Gpu) -> list[str]:
    """Markdown rows of each step's parts, and the sums. `parts`: step -> (part, seconds)."""
    rows = [f"| step | seconds on one {gpu.name} | parts |", "| --- | --- | --- |"]
    total = 0.0
    for step, found in parts.items():
        pairs = [("start", gpu.start), *found]
        seconds = sum(taken for _, taken in pairs)
        total += seconds
        shown = ", ".join(f"{part} {taken:.0f}" for part, taken in pairs if taken >= 0.5)
        rows.append(f"| {step} | {seconds:.0f} | {shown} |")
    return [*rows, f"| all | {total:.0f} ({total / 60:.1f} minutes) | |"]
