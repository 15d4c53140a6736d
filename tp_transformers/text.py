"""Sizes, ranges of integers and tables as text; names that are paths."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def is_path(name: str) -> bool:
    """True if `name` cannot be the name of a model on the Hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def size(nbytes: int) -> str:
    """Format a number of bytes, in units of 1000."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 1)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes / 1000:.1f} kB" if nbytes else "0"


def spans(numbers: Iterable[int]) -> str:
    """Format integers, with consecutive ones as a range: 0-3, 7."""
    groups = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)
