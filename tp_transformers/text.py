"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def size(nbytes: int) -> str:
    """A number of bytes in words, in units of 1000."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 1)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes / 1000:.1f} kB" if nbytes else "0"


def spans(numbers: Iterable[int]) -> str:
    """Integers, with runs of them folded: 0-3, 7."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """A line for each row, with cells below each other; with `right`, all but the first are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = ["<", *(">" if right else "<") * (len(widths) - 1)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
