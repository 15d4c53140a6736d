"""Methods to read the rows of a shard, and the estimated seconds of each.

A shard of a trailing dim is `rows` ranges of `length` bytes, `stride` bytes apart in the file. There are three methods:

- `reads`: one read per row, of the shard's bytes only;
- `blocks`: read complete rows into a buffer that stays in the CPU cache, and copy the ranges out of it;
- `map`: copy the ranges out of a memory map, if the bytes are in the page cache.

Measured on one core of an AMD EPYC (2 MiB of L2 cache, Linux 6.18, ext4, warm page cache) into memory that had been
touched before, in GB/s of the shard's own bytes:

    length of stride    reads   blocks   map
    14,336 of 28,672     4.02     5.75  9.92
     7,168 of 28,672     3.10     3.24  9.50
     3,584 of 28,672     2.05     1.77  7.70
     4,096 of  8,192     2.29     5.86 10.32
     1,024 of  8,192     0.78     1.89  5.32
     2,048 of  4,096     1.09     5.77  8.34
       512 of  1,024     0.45     5.28  6.93

One contiguous read gave 12.2 GB/s there. The constants below reproduce every number of the table within 45%, and their
order.
"""

from __future__ import annotations

from ...slices.stored import Stored

BLOCK_BYTES = 1 << 20
"""Size of the buffer for `blocks`."""

_SECONDS_A_READ = 1.4e-6
_SECONDS_A_BYTE_COPIED = 1 / 12e9
"""Time to copy from the page cache to memory."""
_SECONDS_A_BYTE_INTO_BLOCK = 1 / 16e9
"""Time to copy from the page cache into a buffer that is in the CPU cache."""
_SECONDS_A_BYTE_OUT_OF_BLOCK = 1 / 20e9
_SECONDS_A_RANGE = 10e-9
"""Overhead per range of a strided copy."""
_SECONDS_A_BYTE_MAPPED = 1 / 200e9
"""Time to map and unmap the pages of the span."""


def costs(block: Stored, *, may_map: bool) -> dict[str, float]:
    """Estimate the seconds of each method to read `block`; `map` only if its bytes are in the page cache."""
    range_seconds = block.rows * _SECONDS_A_RANGE
    blocks = max(block.span / BLOCK_BYTES, 1)
    estimates = {
        "reads": block.rows * _SECONDS_A_READ + block.nbytes * _SECONDS_A_BYTE_COPIED,
        "blocks": blocks * _SECONDS_A_READ
        + block.span * _SECONDS_A_BYTE_INTO_BLOCK
        + block.nbytes * _SECONDS_A_BYTE_OUT_OF_BLOCK
        + range_seconds,
    }
    if may_map:
        estimates["map"] = block.span * _SECONDS_A_BYTE_MAPPED + block.nbytes * _SECONDS_A_BYTE_COPIED + range_seconds
    return estimates


def cheapest(block: Stored, *, may_map: bool) -> str:
    """Return the cheapest method to read the rows of `block`."""
    estimates = costs(block, may_map=may_map)
    return min(estimates, key=estimates.__getitem__)
