"""Numbers in words."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """A number of bytes in words, in units of 1000."""
    for unit, scale, digits in (("GB", 10**9, 2), ("MB", 10**6, 1)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes / 1000:.1f} kB" if nbytes else "0"
