"""The minutes of each step, reckoned from bytes and operations before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    context: float = 3.0
    """Seconds in which a copy of a process with these imports creates its context."""
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


def seconds_of(parts: Iterable[tuple[str, float]]) -> float:
    """The sum of a step's parts."""
    return sum(seconds for _, seconds in parts)


def table(parts: Mapping[str, Sequence[tuple[str, float]]], gpu: Gpu, later: Collection[str] = ()) -> list[str]:
    """Markdown rows of each step's parts, and the sum of all but those of `later`. `parts`: step -> (part, seconds)."""
    parts = {"start": [("imports", gpu.start), ("the device's name", gpu.context)], **parts}
    total = sum(seconds_of(found) for step, found in parts.items() if step not in later)
    summed = f"| all of these | {total:.0f} ({total / 60:.1f} minutes) | |"
    rows = [
        [_row(step, found) for step, found in parts.items() if (step in later) == is_later]
        for is_later in (False, True)
    ]
    return [f"| step | seconds on one {gpu.name} | parts |", "| --- | --- | --- |", *rows[0], summed, *rows[1]]


def _row(step: str, parts: Iterable[tuple[str, float]]) -> str:
    shown = ", ".join(f"{part} {seconds:.0f}" for part, seconds in parts if seconds >= 0.5)
    return f"| {step} | {seconds_of(parts):.0f} | {shown} |"
