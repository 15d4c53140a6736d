"""Every small layout against a slow dealer in plain Python.

All heads up to 12 on up to 8 ranks with 20 shares, up to 16 KV heads of 1 to 8 queries on up to 16 even ranks, all
lengths up to 17 units; units of 1, 8 and 64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise

import pytest

from tests.support.tiers import wide
from tp_transformers.slices.layout import Ranks, Split, heads, interleaved, packed

UNITS = (1, 8, 64)


def shares_of(size: int) -> list[Ranks]:
    """20 shares of the ranks, of which the first is even; fewer if they are the same in lowest terms."""
    draw = random.Random(size)
    known = [shares for shares in ([2, 1], [3, 1], [2, 1, 1], [5, 3, 1]) if len(shares) == size]
    steep = ([*range(1, size + 1)], [2**rank for rank in range(size)], [99] + [1] * (size - 1), [1] * (size - 1) + [5])
    drawn = [[draw.randint(1, 9) for _ in range(size)] for _ in range(15 - len(known))]
    return list(dict.fromkeys(map(Ranks.of, ([1] * size, *steep, *known, *drawn))))


@cache
def dealt(count: int, weights: tuple[int, ...]) -> list[int]:
    """Units of each rank: its quota rounded down, the rest by the largest remainder; then nobody goes without."""
    total, ranks = sum(weights), range(len(weights))
    units = [count * weight // total for weight in weights]

    def above(rank: int) -> int:
        return units[rank] * total - count * weights[rank]

    for rank in sorted(ranks, key=above)[: count - sum(units)]:
        units[rank] += 1
    while count >= len(weights) and min(units) == 0:
        units[max((rank for rank in ranks if units[rank] > 1), key=above)] -= 1
        units[units.index(0)] += 1
    return units


def hands(items: Sequence[int], weights: tuple[int, ...]) -> list[list[int]]:
    """The items of each rank, in order."""
    left = iter(items)
    return [[next(left) for _ in range(count)] for count in dealt(len(items), weights)]


def teams(weights: tuple[int, ...], count: int, longest: int) -> list[tuple[int, ...]]:
    """The ranks of each of `count` KV heads: of all ways to cut the ranks in a row, one with the most equal shares."""

    def error(cut: tuple[int, ...]) -> int:
        return sum((sum(weights[first:last]) * count - sum(weights)) ** 2 for first, last in pairwise(cut))

    if len(set(weights)) == 1:  # those with one more rank come first
        best = (0, *accumulate(dealt(len(weights), (1,) * count)))
    else:
        cuts = ((0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), count - 1))
        best = min((cut for cut in cuts if all(last - first <= longest for first, last in pairwise(cut))), key=error)
    return [tuple(range(first, last)) for first, last in pairwise(best)]


@cache
def slow_heads(query: int, kv: int, weights: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """(query heads, KV heads) of every rank."""
    group = query // kv
    if kv >= len(weights):
        return [([head * group + i for head in own for i in range(group)], own) for own in hands(range(kv), weights)]
    found = []
    for head, team in enumerate(teams(weights, kv, group)):
        own_heads = range(head * group, (head + 1) * group)
        found += [(own, [head]) for own in hands(own_heads, tuple(weights[rank] for rank in team))]
    return found


def check(split: Split, expected: Sequence[Sequence[int]]) -> None:
    """Hold a split against the indices that every rank should have."""
    assert indices(split) == expected
    assert split.widths == tuple(map(len, expected))


def indices(split: Split) -> list[list[int]]:
    return [[index for start, stop in ranges for index in range(start, stop)] for ranges in split.ranges]


@cache
def check_owners(split: Split) -> None:
    """Hold the owners of a split, and the ranks that share indices, against what the ranks hold."""
    whole, held = [*range(split.length)], indices(split)
    holders: list[tuple[int, ...]] = [()] * split.length
    for rank, own in enumerate(held):
        for index in own:
            holders[index] += (rank,)
    several = [index for index in whole if len(holders[index]) > 1]
    for reader in range(split.size) if several else [0]:
        # Owners are a partition: every index comes once, from its place in the shard of a rank that holds it.
        cover = split.cover(reader)
        read = [index for part in cover for index in held[part.rank][part.local : part.local + part.length]]
        assert read == whole
        position = 0
        for entry in cover:
            assert position == entry.start
            assert (entry.rank == reader) == (reader in holders[position])
            position += entry.length
    assert split.is_complete
    assert split.shard_ranges == split.cover(0)
    concatenated = [index for own in held for index in own]
    assert [index for start, stop in split.gathered_ranges for index in concatenated[start:stop]] == whole
    assert split.shared_length == len(several)
    for rank, own in enumerate(held):
        told = {}
        for part in split.shared(rank):
            shared = own[part.local : part.local + part.length]
            assert shared == several[part.slot : part.slot + part.length]
            told.update(dict.fromkeys(shared, part.ranks))
        assert told == {index: holders[index] for index in own if len(holders[index]) > 1}


def rows(items: Sequence[int], unit: int) -> list[int]:
    return [item * unit + row for item in items for row in range(unit)]


def attentions(size: int) -> Iterator[tuple[int, int, Ranks, tuple[int, ...]]]:
    """(query heads, KV heads, ranks, their weights) of every attention that has a head for each rank."""
    for kv in range(1, 17):
        for query in range(kv, max(12, 8 * kv) + 1, kv):
            for ranks in shares_of(size) if query <= 12 and size <= 8 else [Ranks(size)]:
                if query >= size:
                    yield query, kv, ranks, ranks.shares or (1,) * ranks.size


@pytest.mark.parametrize("size", wide(sorted(range(1, 17), key=lambda size: size not in (2, 3, 5, 8, 16)), 5))
def test_every_head_lies_where_it_should(size) -> None:
    for query, kv, ranks, weights in attentions(size):
        expected, group = slow_heads(query, kv, weights), query // kv
        queries, keys = heads(query, kv, ranks)
        for own, own_keys in expected:  # grouped-query attention pairs query i with key i // ratio
            ratio = len(own) // len(own_keys)
            assert own
            assert [own_keys[i // ratio] for i in range(len(own))] == [head // group for head in own]
        fused = [[*own, *(query + key for key in keys), *(query + kv + key for key in keys)] for own, keys in expected]
        stored = [
            [
                head * (group + 2) + place
                for head in own_keys
                for place in [*(i for i in range(group) if head * group + i in own), group, group + 1]
            ]
            for own, own_keys in expected
        ]
        assert packed([queries, keys, keys]).length == interleaved(queries, keys).length == query + 2 * kv
        for split, items in (
            (queries, [own for own, _ in expected]),
            (keys, [own_keys for _, own_keys in expected]),
            (packed([queries, keys, keys]), fused),
            (interleaved(queries, keys), stored),
        ):
            check_owners(split)
            for unit in UNITS if size <= 8 else (1,):
                check(split.scaled(unit), [rows(own, unit) for own in items])


@pytest.mark.parametrize("size", wide([3, 8, 1, 2, 4, 5, 6, 7], 2))
def test_every_length_is_dealt_out_in_units(size) -> None:
    for ranks in shares_of(size):
        weights = ranks.shares or (1,) * ranks.size
        for unit in UNITS:
            for length in (full * unit + rest for full in range(18) for rest in sorted({0, 1 % unit, unit - 1})):
                for joins in (False, True):
                    full = length // unit
                    rest = range(full * unit, length)
                    blocks = [range(start * unit, (start + 1) * unit) for start in range(full)]
                    if rest and joins and full >= size:
                        blocks[-1] = range(blocks[-1].start, length)
                    elif rest:
                        blocks.append(rest)
                    expected = [
                        [i for number in own for i in blocks[number]] for own in hands(range(len(blocks)), weights)
                    ]
                    split = ranks.split(length, unit=unit, joins=joins)
                    check(split, expected)
                    if unit < 64:
                        check_owners(split)
