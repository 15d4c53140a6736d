"""Properties of the slice arithmetic, for any sizes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_transformers.slices.layout import Layout, Ranks, Split, heads, interleaved, packed

sizes = st.integers(1, 16)


def shares(size: int) -> st.SearchStrategy[Ranks]:
    """That many ranks, even or with shares of their own."""
    own = st.lists(st.integers(1, 9) | st.floats(0.1, 9), min_size=size, max_size=size).map(Ranks.of)
    return st.just(Ranks(size)) | own


@st.composite
def attention(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, KV heads, ranks) with no more ranks than query heads."""
    kv = draw(st.integers(1, 16))
    query = kv * draw(st.integers(1, 8))
    return query, kv, draw(st.integers(1, min(16, query)))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Any split that a plan can ask for."""
    ranks = draw(sizes.flatmap(shares))
    kind = draw(st.sampled_from(["even", "heads", "packed", "qkv", "interleaved"]))
    if kind == "even":
        return ranks.split(draw(st.integers(0, 200)), unit=draw(st.integers(1, 9)))
    if kind == "packed":
        return packed([ranks.split(length) for length in draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))])
    query, kv, size = draw(attention())
    width, ranks = draw(st.integers(1, 8)), draw(shares(size))
    if kind == "interleaved":
        return interleaved(*heads(query, kv, ranks)).scaled(width)
    query_split, kv_split = (split.scaled(width) for split in heads(query, kv, ranks))
    return (
        packed([query_split, kv_split, kv_split]) if kind == "qkv" else draw(st.sampled_from([query_split, kv_split]))
    )


def indices(split: Split, rank: int) -> list[int]:
    return [index for start, stop in split.ranges[rank] for index in range(start, stop)]


@given(splits())
def test_every_index_is_held_and_overlaps_are_whole_ranges(split: Split) -> None:
    assert {index for rank in range(split.size) for index in indices(split, rank)} == set(range(split.length))
    held = {held for ranges in split.ranges for held in ranges if held[0] < held[1]}
    for a in held:
        for b in held:
            assert a == b or a[1] <= b[0] or b[1] <= a[0]


@given(splits())
def test_widths_count_what_is_held(split: Split) -> None:
    assert split.widths == tuple(len(indices(split, rank)) for rank in range(split.size))


@given(splits())
def test_shard_ranges_undo_the_split(split: Split) -> None:
    whole = torch.arange(split.length)
    shards = [whole[indices(split, rank)] for rank in range(split.size)]
    rebuilt = torch.full((split.length,), -1)
    for entry in split.shard_ranges:
        assert (rebuilt[entry.start : entry.start + entry.length] == -1).all()
        rebuilt[entry.start : entry.start + entry.length] = shards[entry.rank][entry.local : entry.local + entry.length]
    assert torch.equal(rebuilt, whole)


@given(splits(), st.integers(0, 20))
def test_a_cover_takes_from_its_reader_what_that_holds(split: Split, reader: int) -> None:
    cover = split.cover(reader)
    assert [index for entry in cover for index in range(entry.start, entry.start + entry.length)] == [
        *range(split.length)
    ]
    own = set(indices(split, reader)) if reader < split.size else set()
    for entry in cover:
        held = indices(split, entry.rank)[entry.local : entry.local + entry.length]
        assert held == [*range(entry.start, entry.start + entry.length)]
        assert (entry.rank == reader) == (entry.start in own)


@given(splits(), st.data())
def test_a_split_that_lacks_or_repeats_an_index_is_no_cut(split: Split, data: st.DataObject) -> None:
    assert split.is_complete
    held = all_ranges(split)
    start, stop = data.draw(st.sampled_from(held)) if held else (0, 0)
    if stop - start > 1:  # one rank holds a part of what another holds
        assert not Split(split.length, (*split.ranges, ((start, stop - 1),))).is_complete
    assert not Split(split.length + 1, split.ranges).is_complete
    without = tuple(tuple(part for part in ranges if part != (start, stop)) for ranges in split.ranges)
    assert Split(split.length, without).is_complete == (start == stop)


def all_ranges(split: Split) -> list[tuple[int, int]]:
    return sorted({(start, stop) for ranges in split.ranges for start, stop in ranges if start < stop})


@given(splits())
def test_shared_names_exactly_the_indices_that_others_hold(split: Split) -> None:
    for rank in range(split.size):
        mine = indices(split, rank)
        told = {mine[part.local + offset]: part.ranks for part in split.shared(rank) for offset in range(part.length)}
        for index in mine:
            holders = tuple(other for other in range(split.size) if index in indices(split, other))
            assert told.get(index, (rank,)) == holders


@given(splits())
def test_every_index_that_several_ranks_hold_has_one_slot(split: Split) -> None:
    several = [
        index for index in range(split.length) if sum(index in indices(split, rank) for rank in range(split.size)) > 1
    ]
    assert split.shared_length == len(several)
    for rank in range(split.size):
        mine = indices(split, rank)
        for part in split.shared(rank):
            assert mine[part.local : part.local + part.length] == several[part.slot : part.slot + part.length]


@given(splits())
def test_holders_are_the_ranks_that_share_an_index(split: Split) -> None:
    ranks = [[rank for rank in range(split.size) if index in indices(split, rank)] for index in range(split.length)]
    assert split.holders == tuple(sorted({tuple(held) for held in ranks if len(held) > 1}))


@given(splits())
def test_is_chunked_means_what_torch_chunk_gives(split: Split) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(split.length).chunk(split.size)] if split.length else []
    chunks += [[]] * (split.size - len(chunks))
    assert split.is_chunked == (chunks == [indices(split, rank) for rank in range(split.size)])


@given(st.integers(0, 500), sizes, st.integers(1, 32))
def test_even_keeps_blocks_whole_and_differs_by_one_block(length: int, size: int, unit: int) -> None:
    split = Ranks(size).split(length, unit=unit)
    for rank, ((start, stop),) in enumerate(split.ranges):
        assert start % unit == 0 or start == length
        assert stop % unit == 0 or stop == length
        assert rank == 0 or -(-split.widths[rank] // unit) <= -(-split.widths[rank - 1] // unit)
    blocks = [-(-width // unit) for width in split.widths]
    assert max(blocks) - min(blocks) <= 1


@given(sizes.flatmap(shares), st.integers(0, 500))
def test_no_rank_is_left_out_and_none_has_more_than_its_share_rounded_up(ranks: Ranks, count: int) -> None:
    weights = ranks.shares or (1,) * ranks.size
    units = ranks.counts(count)
    assert sum(units) == count
    for own, weight in zip(units, weights, strict=True):
        assert own <= max(1, -(-count * weight // sum(weights)))
    assert count < len(units) or all(units)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(0, 500))
def test_shares_are_apportioned_by_hamiltons_method(weights: list[int], count: int) -> None:
    """Against the method in words: everyone's quota, rounded down; the rest by the largest remainder, in order."""
    quotas = [Fraction(count * weight, sum(weights)) for weight in weights]
    units = [int(quota) for quota in quotas]
    ordered = sorted(range(len(weights)), key=lambda rank: (units[rank] - quotas[rank], rank))
    for rank in ordered[: count - sum(units)]:
        units[rank] += 1
    if all(units):
        assert Ranks.of(weights).counts(count) == tuple(units)


def test_shares_are_traced_with_a_symbolic_length() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x[: Ranks(3, (3, 1, 2)).counts(x.shape[0])[0]].sum()

    compiled = torch.compile(first, backend="eager", dynamic=True, fullgraph=True)
    for length in (96, 97, 101, 40):
        x = torch.arange(float(length))
        assert torch.equal(compiled(x), first(x))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([2, 1, 1], (2, 1, 1)),
        ([48e9, 24e9, 24e9], (2, 1, 1)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([0.1, 0.7], (1, 7)),
        ([3, 3, 3], None),
        ([1e-9, 1e-9], None),
        ([1, 1e-9], (10**6, 1)),
    ],
)
def test_shares_in_lowest_terms(weights: list[float], shares: tuple[int, ...] | None) -> None:
    assert Ranks.of(weights) == Ranks(len(weights), shares)


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_shares_are_positive_and_finite(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Ranks.of(weights)


@given(attention(), st.data())
def test_heads_keep_an_integer_ratio_and_every_query_with_its_kv_head(
    case: tuple[int, int, int], data: st.DataObject
) -> None:
    query, kv, size = case
    query_split, kv_split = heads(query, kv, data.draw(shares(size)))
    group = query // kv
    for rank in range(size):
        queries, kvs = indices(query_split, rank), indices(kv_split, rank)
        assert queries
        assert len(queries) % len(kvs) == 0
        ratio = len(queries) // len(kvs)
        # Grouped-query attention pairs local query i with local KV head i // ratio.
        assert [kvs[i // ratio] for i in range(len(queries))] == [head // group for head in queries]
    # No query head is computed twice; KV heads are replicated only where there are fewer of them than ranks.
    assert sum(query_split.widths) == query
    assert kv < size or sum(kv_split.widths) == kv


@pytest.mark.parametrize(
    "call",
    [
        lambda: heads(8, 3, Ranks(2)),
        lambda: heads(4, 2, Ranks(5)),
        lambda: heads(8, 0, Ranks(2)),
        lambda: Ranks(2).split(-1),
        lambda: Ranks(0).split(4),
        lambda: Ranks(2).split(4, unit=0),
        lambda: packed([]),
        lambda: packed([Ranks(2).split(4), Ranks(3).split(4)]),
    ],
)
def test_impossible_requests_raise(call) -> None:
    with pytest.raises(ValueError, match=r"need|ranks|multiple"):
        call()


@given(splits(), st.integers(0, 2))
def test_layout_gives_local_shapes(split: Split, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = split.length
    for rank in range(split.size):
        local = Layout(dim, split).local_shape(shape, rank)
        assert local[dim] == len(indices(split, rank))
        assert local[:dim] + local[dim + 1 :] == tuple(shape[:dim] + shape[dim + 1 :])
