"""Slice arithmetic on plain integers: the indices of a dim that each rank holds.

This module does not import torch.distributed: a rank is an index, a group its size. A `Split` divides one length over
the ranks; a `Layout` pairs a dim of a tensor with its split.

    even(10, 4)        [0 1 2 | 3 4 5 | 6 7 | 8 9]
    chunked(10, 4)     [0 1 2 | 3 4 5 | 6 7 8 | 9]                    as DTensor shards
    heads(9, 3, 2)     query [0-5 | 6-8], key/value [0 1 | 2]         complete KV groups
    heads(8, 2, 4)     query [0 1 | 2 3 | 4 5 | 6 7], key/value [0 | 0 | 1 | 1]     replicated KV heads
    packed([A, B])     AABB -> [AB | AB]                              each part with its own split
    interleaved(q, kv) qqkvqqkv -> [qqkv | qqkv]                      fused projections stored group after group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""A half-open index range, (start, stop)."""


@dataclass(frozen=True)
class Piece:
    """A range of `length` indices: at `local` in the shard of `rank`, at `start` in the full tensor."""

    rank: int
    local: int
    start: int
    length: int


@dataclass(frozen=True)
class Shared:
    """A range of `length` indices that all of `ranks` hold, at `local` in this rank's shard.

    It starts at `slot` in the concatenation of all ranges that several ranks hold.
    """

    local: int
    slot: int
    length: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A split of `length` indices over ranks: `ranges[rank]` lists the ranges of that rank, in the order of its shard.

    Any two ranges are disjoint or equal; equal ranges are replicated (KV heads).
    """

    length: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranges)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of indices of each rank."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @cached_property
    def _shared_slots(self) -> dict[Range, int]:
        """The ranges that several ranks hold, ascending, each with its offset in their concatenation."""
        if sum(self.widths) == self.length:
            return {}
        counts = Counter(entry for ranges in self.ranges for entry in set(ranges) if entry[0] < entry[1])
        several = sorted(entry for entry, ranks in counts.items() if ranks > 1)
        lengths = (stop - start for start, stop in several)
        return dict(zip(several, accumulate(lengths, initial=0), strict=False))

    @cached_property
    def shared_length(self) -> int:
        """Number of indices that several ranks hold, each counted once."""
        return sum(stop - start for start, stop in self._shared_slots)

    def shared(self, rank: int) -> tuple[Shared, ...]:
        """The ranges of `rank` that other ranks hold too."""
        shared = []
        local = 0
        for entry in self.ranges[rank]:
            length = entry[1] - entry[0]
            if entry in self._shared_slots:
                ranks = tuple(peer for peer in range(self.size) if entry in self.ranges[peer])
                shared.append(Shared(local, self._shared_slots[entry], length, ranks))
            local += length
        return tuple(shared)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that hold the same range."""
        return tuple(sorted({entry.ranks for rank in range(self.size) for entry in self.shared(rank)}))

    @property
    def is_chunked(self) -> bool:
        """True if the split is `chunked`, as in DTensor's `Shard` placement."""
        chunks = chunked(self.length, self.size).ranges
        return all(joined(own) == joined(expected) for own, expected in zip(self.ranges, chunks, strict=True))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """A cover of the full length without overlap: the copies that undo the split."""
        return self.cover(0)

    def cover(self, reader: int) -> tuple[Piece, ...]:
        """A cover of the full length without overlap, for one of several readers.

        A reader reads the ranges that it holds from itself. Other replicated ranges come from holder
        `reader % number of holders`, which spreads the readers.
        """
        holders: dict[Range, list[Piece]] = {}
        for rank, ranges in enumerate(self.ranges):
            local = 0
            for start, stop in ranges:
                if stop > start:
                    holders.setdefault((start, stop), []).append(Piece(rank, local, start, stop - start))
                local += stop - start
        return tuple(
            next((piece for piece in pieces if piece.rank == reader), pieces[reader % len(pieces)])
            for _, pieces in sorted(holders.items())
        )

    @property
    def is_cut(self) -> bool:
        """True if every index is held, and any two ranges are disjoint or equal: the invariant of `Split`."""
        position = 0
        for piece in self.pieces:
            if piece.start != position:
                return False
            position += piece.length
        return position == self.length

    def scaled(self, unit: int) -> Split:
        """The same split with each index expanded to `unit` consecutive indices (heads -> rows)."""
        return Split(
            self.length * unit,
            tuple(tuple((start * unit, stop * unit) for start, stop in ranges) for ranges in self.ranges),
        )


@dataclass(frozen=True)
class Layout:
    """The layout of a sharded tensor: `dim` is sharded by `split`, all other dims are full.

    In `Layout | None`, None means that the tensor is replicated.
    """

    dim: int
    split: Split

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`, for a full tensor of `shape`."""
        local = list(shape)
        local[self.dim] = self.split.widths[rank]
        return tuple(local)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges and drop empty ones; the order of the indices stays."""
    result: list[Range] = []
    for start, stop in ranges:
        if start >= stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def union(ranges: Iterable[Range]) -> list[Range]:
    """The union of the ranges, ascending."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return result


@cache
def even(length: int, size: int, *, unit: int = 1) -> Split:
    """Split `length` evenly, in multiples of `unit`; the first ranks hold one `unit` more.

    A remainder shorter than `unit` counts as one. Raises ValueError for `length < 0`, `size < 1` or `unit < 1`.
    """
    if length < 0 or size < 1 or unit < 1:
        raise ValueError(f"even({length}, {size}, unit={unit}): need length >= 0, size >= 1, unit >= 1")
    blocks = -(-length // unit)
    return Split(
        length,
        tuple(((min(start * unit, length), min(stop * unit, length)),) for start, stop in _even_ranges(blocks, size)),
    )


def even_widths(length: int, size: int) -> tuple[int, ...]:
    """Number of indices of each rank in `even(length, size)`; torch.compile can trace this function."""
    return tuple(length // size + (rank < length % size) for rank in range(size))


@cache
def chunked(length: int, size: int) -> Split:
    """Split `length` as `torch.chunk` does: ceil(length / size) indices per rank; the last ranks get fewer or none."""
    chunk = -(-length // size)
    starts = [min(rank * chunk, length) for rank in range(size + 1)]
    return Split(length, tuple(((start, stop),) for start, stop in pairwise(starts)))


def heads(query: int, kv: int, size: int) -> tuple[Split, Split]:
    """Split `query` attention heads and their `kv` key/value heads; returns (query split, key/value split), in heads.

    With `kv >= size`, ranks hold complete KV groups. With `kv < size`, each KV head is replicated on consecutive ranks,
    which split its query heads. Either way the query-to-KV ratio of a rank is an integer, so that grouped-query
    attention works on the shard; the ratio may differ between ranks.

    Raises ValueError if `kv` does not divide `query`, or if there are more ranks than query heads (replicate such
    attention).
    """
    if kv < 1 or query % kv:
        raise ValueError(f"{query} query heads are not a multiple of {kv} key/value heads")
    if size > query:
        raise ValueError(f"{size} ranks are more than {query} query heads")
    group = query // kv
    if kv >= size:
        kv_split = even(kv, size)
        return kv_split.scaled(group), kv_split
    query_ranges: list[tuple[Range, ...]] = []
    kv_ranges: list[tuple[Range, ...]] = []
    for head, (first, last) in enumerate(_even_ranges(size, kv)):
        for start, stop in _even_ranges(group, last - first):
            query_ranges.append(((head * group + start, head * group + stop),))
            kv_ranges.append(((head, head + 1),))
    return Split(query, tuple(query_ranges)), Split(kv, tuple(kv_ranges))


def packed(parts: Sequence[Split]) -> Split:
    """Combine the splits of parts that are stored consecutively: each rank holds its shard of every part.

    `AABB -> [AB, AB]`. Raises ValueError without parts, or if parts are split for different numbers of ranks.
    """
    sizes = {part.size for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"packed() needs parts cut for one number of ranks, got {sorted(sizes)}")
    per_rank: list[list[Range]] = [[] for _ in range(parts[0].size)]
    offset = 0
    for part in parts:
        for rank, ranges in enumerate(part.ranges):
            per_rank[rank].extend((offset + start, offset + stop) for start, stop in ranges)
        offset += part.length
    return Split(offset, tuple(map(tuple, per_rank)))


def interleaved(query: Split, kv: Split) -> Split:
    """Split a fused projection that stores, for every KV head, its query heads, the key and the value, in heads.

    `qqkvqqkv -> [qqkv, qqkv]`. Each rank holds its query heads of `query`, followed by their KV heads of `kv`; both are
    splits from `heads`.
    """
    group = query.length // kv.length
    stored = group + 2
    per_rank: list[tuple[Range, ...]] = []
    for queries, keys in zip(query.ranges, kv.ranges, strict=True):
        ranges: list[Range] = []
        for head in (head for start, stop in keys for head in range(start, stop)):
            base, first = head * stored, head * group
            for start, stop in queries:
                low, high = max(start, first), min(stop, first + group)
                if low < high:
                    ranges.append((base + low - first, base + high - first))
            ranges.append((base + group, base + stored))
        per_rank.append(tuple(ranges))
    if kv.length >= kv.size:  # complete groups: no range is replicated, so adjacent ranges may be joined
        per_rank = [tuple(joined(ranges)) for ranges in per_rank]
    return Split(kv.length * stored, tuple(per_rank))


def _even_ranges(count: int, size: int) -> Iterator[Range]:
    """Split `count` into `size` consecutive ranges; the first `count % size` are longer by one."""
    base, extra = divmod(count, size)
    start = 0
    for index in range(size):
        stop = start + base + (index < extra)
        yield start, stop
        start = stop
