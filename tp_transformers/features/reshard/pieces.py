"""Where the indices of each new shard come from: a pure function over intervals, without tensors.

old, 3 ranks   [0 1 2 | 3 4 5 | 6 7]        new, 2 ranks   [0 1 2 3 | 4 5 6 7]
rank 0         0 to 2 from itself, 3 from rank 1
rank 1         4 and 5 from itself, 6 and 7 from rank 2
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...slices.layout import Range

CHECKPOINT = -1
"""The source of what no rank holds."""


@dataclass(frozen=True)
class Piece:
    """`length` indices of a dim from `start` on; they are at `local` in the source's shard, at `at` in the new one."""

    source: int
    """A rank, or `CHECKPOINT`; `local` is then 0."""
    start: int
    local: int
    at: int
    length: int


def assign(
    wanted: Mapping[int, Sequence[Range]], held: Mapping[int, Sequence[Range]], sent: Counter[int], unit: int = 1
) -> dict[int, list[Piece]]:
    """Assign a source to every index that a rank wants: the rank itself, or another that holds it, or the checkpoint.

    Of several ranks that hold an index, the one that has sent least sends it, the lowest of equals.

    Args:
        wanted: rank -> the ranges of its new shard, in order.
        held: rank -> the ranges of its old shard, in order.
        sent: rank -> what it has been assigned to send so far; updated.
        unit: what one index counts in `sent`.
    """
    ends = sorted({end for ranges in (*wanted.values(), *held.values()) for bounds in ranges for end in bounds})
    holders: list[dict[int, int]] = [{} for _ in ends]
    for rank, ranges in held.items():
        for (start, stop), local in zip(ranges, accumulate((b - a for a, b in ranges), initial=0), strict=False):
            for index in range(bisect_right(ends, start) - 1, bisect_right(ends, stop) - 1):
                holders[index].setdefault(rank, local + ends[index] - start)
    assigned = {}
    for rank, ranges in wanted.items():
        pieces: list[Piece] = []
        for piece in _cut(ranges, ends, holders, rank, sent, unit):
            last = pieces[-1] if pieces else None
            if last is not None and _follows(piece, last):
                pieces[-1] = replace(last, length=last.length + piece.length)
            else:
                pieces.append(piece)
        assigned[rank] = pieces
    return assigned


def _cut(
    ranges: Sequence[Range],
    ends: Sequence[int],
    holders: Sequence[Mapping[int, int]],
    rank: int,
    sent: Counter[int],
    unit: int,
) -> Iterator[Piece]:
    """The `ranges` of `rank` in pieces between neighbouring `ends`, each with its source."""
    at = 0
    for start, stop in ranges:
        first, last = bisect_right(ends, start) - 1, bisect_right(ends, stop) - 1
        for index, (low, high) in enumerate(pairwise(ends[first : last + 1]), first):
            held = holders[index]
            source = rank if rank in held else min(held, key=lambda holder: (sent[holder], holder), default=CHECKPOINT)
            if source not in (rank, CHECKPOINT):
                sent[source] += (high - low) * unit
            yield Piece(source, low, held.get(source, 0), at, high - low)
            at += high - low


def _follows(piece: Piece, last: Piece) -> bool:
    """True if `piece` continues `last` in the full tensor, in the source, and in the new shard."""
    end = last.start + last.length, last.at + last.length
    is_next = piece.source == CHECKPOINT or piece.local == last.local + last.length
    return (piece.source, piece.start, piece.at) == (last.source, *end) and is_next
