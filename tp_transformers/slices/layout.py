"""Slice arithmetic on plain integers: the indices of a dim that each rank holds.

This module does not import torch.distributed: a rank is an index, `Ranks` are a number, perhaps with shares. A `Split`
divides one length over the ranks; a `Layout` pairs a dim of a tensor with its split.

    Ranks(4).split(10)              [0 1 2 | 3 4 5 | 6 7 | 8 9]
    Ranks(3, (2, 1, 1)).split(8)    [0 1 2 3 | 4 5 | 6 7]              by the ranks' shares
    chunked(10, 4)                  [0 1 2 | 3 4 5 | 6 7 8 | 9]        as DTensor shards
    heads(9, 3, Ranks(2))           query [0-5 | 6-8], key/value [0 1 | 2]         complete KV groups
    heads(8, 2, Ranks(4))           query [0 1 | 2 3 | 4 5 | 6 7], key/value [0 | 0 | 1 | 1]     replicated KV heads
    packed([A, B])     AABB -> [AB | AB]                              each part with its own split
    interleaved(q, kv) qqkvqqkv -> [qqkv | qqkv]                      fused projections stored group after group
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise

Range = tuple[int, int]
"""A half-open index range, (start, stop)."""


@dataclass(frozen=True)
class ShardRange:
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
        counts = Counter(entry for ranges in self.ranges for entry in set(ranges))
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
        for entry in self.held(rank):
            indices = (entry.start, entry.start + entry.length)
            if indices in self._shared_slots:
                ranks = tuple(peer for peer in range(self.size) if indices in self.ranges[peer])
                shared.append(Shared(entry.local, self._shared_slots[indices], entry.length, ranks))
        return tuple(shared)

    @property
    def is_chunked(self) -> bool:
        """True if the split is `chunked`, as in DTensor's `Shard` placement."""
        chunks = chunked(self.length, self.size).ranges
        return all(joined(own) == joined(expected) for own, expected in zip(self.ranges, chunks, strict=True))

    @cached_property
    def shard_ranges(self) -> tuple[ShardRange, ...]:
        """A cover of the full length without overlap: the copies that undo the split."""
        return self.cover(0)

    @cached_property
    def gathered_ranges(self) -> tuple[Range, ...]:
        """Ranges of the concatenated shards of all ranks that, in this order, are the full length; one if in order."""
        starts = list(accumulate(self.widths, initial=0))
        places = ((starts[entry.rank] + entry.local, entry.length) for entry in self.shard_ranges)
        return tuple(joined((start, start + length) for start, length in places))

    def held(self, rank: int) -> list[ShardRange]:
        """The ranges of `rank`, including those that other ranks hold too."""
        return [ShardRange(rank, local, start, stop - start) for start, stop, local in placed(self.ranges[rank])]

    def cover(self, reader: int) -> tuple[ShardRange, ...]:
        """A cover of the full length without overlap, for one of several readers.

        A reader reads the ranges that it holds from itself. Other replicated ranges come from holder
        `reader % number of holders`, which spreads the readers.
        """
        holders: dict[Range, list[ShardRange]] = {}
        for entry in chain.from_iterable(map(self.held, range(self.size))):
            holders.setdefault((entry.start, entry.start + entry.length), []).append(entry)
        return tuple(
            next((entry for entry in ranges if entry.rank == reader), ranges[reader % len(ranges)])
            for _, ranges in sorted(holders.items())
        )

    @property
    def is_complete(self) -> bool:
        """True if every index is held, and any two ranges are disjoint or equal: the invariant of `Split`."""
        ranges = joined((entry.start, entry.start + entry.length) for entry in self.shard_ranges)
        return ranges == joined([(0, self.length)])

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


def placed(ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, position of the start in the concatenation of `ranges`) of each range that is not empty."""
    position = 0
    for start, stop in ranges:
        if stop > start:
            yield start, stop, position
        position += stop - start


def overlaps(lengths: Sequence[int], ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a concatenation that `ranges` of it select, in that order: (index of the part, start, stop).

    `lengths` are those of all parts; start and stop are within the part.
    """
    for start, stop in ranges:
        for index, (first, last) in enumerate(pairwise(accumulate(lengths, initial=0))):
            if max(start, first) < min(stop, last):
                yield index, max(start, first) - first, min(stop, last) - first


def union(ranges: Iterable[Range]) -> list[Range]:
    """The union of the ranges, ascending."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return result


LARGEST_DENOMINATOR = 10**6
"""Shares are multiples of the largest one, divided by up to this number."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that divide lengths: `size` ranks, evenly, or by the `shares` of the ranks in lowest terms."""

    size: int
    shares: tuple[int, ...] | None = None

    @classmethod
    def of(cls, shares: Sequence[float]) -> Ranks:
        """Bring the shares of ranks to lowest terms, as integers; no shares if all are equal.

        `(0.5, 0.25, 0.25)` and `(48, 24, 24)` become `(2, 1, 1)`. See LARGEST_DENOMINATOR.
        Raises ValueError unless all are positive and finite.
        """
        if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
            raise ValueError(f"shares {list(shares)} are not positive numbers")
        largest, least = max(map(Fraction, shares)), Fraction(1, LARGEST_DENOMINATOR)
        fractions = [max((Fraction(share) / largest).limit_denominator(LARGEST_DENOMINATOR), least) for share in shares]
        common = math.lcm(*(fraction.denominator for fraction in fractions))
        counts = [int(fraction * common) for fraction in fractions]
        divisor = math.gcd(*counts)
        return cls(len(shares), None if len(set(counts)) == 1 else tuple(count // divisor for count in counts))

    @cache  # noqa: B019 - of a few values
    def split(self, length: int, *, unit: int = 1, joins: bool = False) -> Split:
        """Split `length` evenly, or by the shares of the ranks, in multiples of `unit`; see `counts`.

        A remainder shorter than `unit` counts as one; with `joins` it belongs to the last unit, if every rank has one.
        Raises ValueError for `length < 0`, no ranks or `unit < 1`.
        """
        if length < 0 or self.size < 1 or unit < 1:
            raise ValueError(f"split of {length} over {self}, unit={unit}: need length >= 0, ranks >= 1, unit >= 1")
        blocks = length // unit if joins and length // unit >= self.size else -(-length // unit)
        ranges = ([length if block == blocks else block * unit for block in ends] for ends in self.ranges(blocks))
        return Split(length, tuple(((start, stop),) for start, stop in ranges))

    def counts(self, count: int) -> tuple[int, ...]:
        """Number of each rank's units of `count`; torch.compile can trace this method.

        Without shares, the first `count % size` ranks hold one more. Shares are met by the largest remainder
        (Hamilton's method), within one unit of each. But if there are as many units as ranks, every rank has one: the
        ranks most above their share give theirs.
        """
        shares = self.shares
        if shares is None:
            return tuple(count // self.size + (rank < count % self.size) for rank in range(self.size))
        total, everyone = sum(shares), range(self.size)
        units = [count * share // total for share in shares]
        left, remainders = count - sum(units), [count * share % total for share in shares]
        for rank, own in enumerate(remainders):  # no sort: the count may be symbolic
            before = sum(other > own or (other == own and peer < rank) for peer, other in enumerate(remainders))
            units[rank] += before < left
        while count >= self.size and 0 in units:
            giving = max(everyone, key=lambda rank: (units[rank] > 1, units[rank] * total - count * shares[rank]))
            units[giving] -= 1
            units[units.index(0)] = 1
        return tuple(units)

    def ranges(self, count: int) -> Iterator[Range]:
        """Divide `count` units into consecutive ranges, one of each rank."""
        return pairwise(accumulate(self.counts(count), initial=0))

    def among(self, first: int, last: int) -> Ranks:
        """The ranks from `first` to before `last`."""
        return Ranks(last - first, None if self.shares is None else self.shares[first:last])

    def groups(self, count: int, longest: int) -> Iterator[Range]:
        """Divide the ranks into `count` ranges of 1 to `longest`, with shares as equal as possible: least squares."""
        if self.shares is None:
            return Ranks(count).ranges(self.size)
        bounds = list(accumulate(self.shares, initial=0))

        @cache
        def best(first: int, number: int) -> tuple[float, tuple[int, ...]]:
            """(sum of squared shares, stops) of the best `number` ranges from the rank `first` on."""
            if not number:
                return (0, ()) if first == self.size else (math.inf, ())
            found = []
            for stop in range(first + 1, min(first + longest, self.size) + 1):
                squares, stops = best(stop, number - 1)
                found.append((squares + (bounds[stop] - bounds[first]) ** 2, (stop, *stops)))  # exact: no rounding
            return min(found, default=(math.inf, ()))

        return pairwise((0, *best(0, count)[1]))


@cache
def chunked(length: int, size: int) -> Split:
    """Split `length` as `torch.chunk` does: ceil(length / size) indices per rank; the last ranks get fewer or none."""
    chunk = -(-length // size)
    starts = [min(rank * chunk, length) for rank in range(size + 1)]
    return Split(length, tuple(((start, stop),) for start, stop in pairwise(starts)))


def heads(query: int, kv: int, ranks: Ranks) -> tuple[Split, Split]:
    """Split `query` attention heads and their `kv` key/value heads; returns (query split, key/value split), in heads.

    With as many KV heads as ranks, or more, ranks hold complete KV groups. With fewer, each KV head is replicated on
    consecutive ranks, which split its query heads. Either way the query-to-KV ratio of a rank is an integer, so that
    grouped-query attention works on the shard; the ratio may differ between ranks.

    Raises ValueError if `kv` does not divide `query`, or if there are more ranks than query heads (replicate such
    attention).
    """
    size = ranks.size
    if kv < 1 or query % kv:
        raise ValueError(f"{query} query heads are not a multiple of {kv} key/value heads")
    if size > query:
        raise ValueError(f"{size} ranks are more than {query} query heads")
    group = query // kv
    if kv >= size:
        kv_split = ranks.split(kv)
        return kv_split.scaled(group), kv_split
    query_ranges: list[tuple[Range, ...]] = []
    kv_ranges: list[tuple[Range, ...]] = []
    for head, (first, last) in enumerate(ranks.groups(kv, group)):
        for start, stop in ranks.among(first, last).ranges(group):
            query_ranges.append(((head * group + start, head * group + stop),))
            kv_ranges.append(((head, head + 1),))
    return Split(query, tuple(query_ranges)), Split(kv, tuple(kv_ranges))


def packed(parts: Sequence[Split]) -> Split:
    """Combine the splits of parts that are stored consecutively: each rank holds its shard of every part.

    `AABB -> [AB, AB]`. Raises ValueError without parts, or if parts are split for different numbers of ranks.
    """
    sizes = {part.size for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"packed() needs parts split for one number of ranks, got {sorted(sizes)}")
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
