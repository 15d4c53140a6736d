"""Properties of the slice arithmetic, for any sizes; `test_every_layout` has all small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.slices.test_every_layout import check_owners
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


@given(splits(), st.integers(16, 20))
def test_any_split_has_the_owners_that_its_indices_have(split, stranger) -> None:
    """Also splits of several lengths, which `test_every_layout` has none of; a reader that is no rank has nothing."""
    check_owners(split)
    held = [indices(split, rank) for rank in range(split.size)]
    assert split.widths == tuple(map(len, held))
    assert [each for part in split.cover(stranger) for each in held[part.rank][part.local :][: part.length]] == [
        *range(split.length)
    ]
    parts = all_ranges(split)
    assert all(first[1] <= second[0] for first, second in pairwise(parts)), "ranges are equal or apart"
    ranks = [tuple(rank for rank in range(split.size) if index in held[rank]) for index in range(split.length)]
    shared = {entry.ranks for rank in range(split.size) for entry in split.shared(rank)}
    assert shared == {each for each in ranks if len(each) > 1}
    chunks = [chunk.tolist() for chunk in torch.arange(split.length).chunk(split.size)] if split.length else []
    assert split.is_chunked == ([*chunks, *[[]] * (split.size - len(chunks))] == held)


@given(splits(), st.data())
def test_a_split_that_lacks_or_repeats_an_index_is_no_cut(split, data) -> None:
    held = all_ranges(split)
    start, stop = data.draw(st.sampled_from(held)) if held else (0, 0)
    if stop - start > 1:  # one rank holds a part of what another holds
        assert not Split(split.length, (*split.ranges, ((start, stop - 1),))).is_complete
    assert not Split(split.length + 1, split.ranges).is_complete
    without = tuple(tuple(part for part in ranges if part != (start, stop)) for ranges in split.ranges)
    assert Split(split.length, without).is_complete == (start == stop)


def all_ranges(split: Split) -> list[tuple[int, int]]:
    return sorted({(start, stop) for ranges in split.ranges for start, stop in ranges if start < stop})


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
def test_shares_in_lowest_terms(weights, shares) -> None:
    assert Ranks.of(weights) == Ranks(len(weights), shares)


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_shares_are_positive_and_finite(weights) -> None:
    with pytest.raises(ValueError, match="positive"):
        Ranks.of(weights)


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
def test_layout_gives_local_shapes(split, dim) -> None:
    shape = [3, 4, 5]
    shape[dim] = split.length
    for rank in range(split.size):
        local = Layout(dim, split).local_shape(shape, rank)
        assert local[dim] == len(indices(split, rank))
        assert local[:dim] + local[dim + 1 :] == tuple(shape[:dim] + shape[dim + 1 :])
