"""Who fetches what: every byte that is needed once, few that are not, and each where it belongs."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tp_transformers.checkpoint.reading.jobs import Request
from tp_transformers.features.hub_streaming import fetch_plan as shares
from tp_transformers.features.hub_streaming.fetch import _copy, _places
from tp_transformers.features.hub_streaming.fetch_plan import Need, divide, split_request
from tp_transformers.slices.layout import Ranks
from tp_transformers.slices.stored import Source, Stored


class Nowhere(Source):
    """A file that nobody reads."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 1 << 20

    def read(self, offset: int, buffers: Any) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


FILES = [Nowhere("a"), Nowhere("b")]


@st.composite
def needs_of_ranks(draw: st.DrawFn) -> tuple[int, list[Need]]:
    """Tensors in two files, some with gaps between them, each cut, whole on all ranks, or needed by one alone."""
    size = draw(st.integers(1, 4))
    needs = []
    for file, source in enumerate(FILES):
        offset = draw(st.integers(8, 40))
        for _ in range(draw(st.integers(0, 6))):
            shape = draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
            stored = Stored(source, offset=offset, shape=shape, dtype=torch.int16)
            how = draw(st.sampled_from(["cut", "whole", "one", "twice", "nobody"]))
            dim = draw(st.integers(0, len(shape) - 1))
            for rank in range(size):
                own = Ranks(size).split(shape[dim]).ranges[rank]
                fetch = stored.select(dim, own) if how in ("cut", "twice") else stored
                if how != "nobody" and (how != "one" or rank == dim % size) and fetch.nbytes:
                    needs += [Need(rank, file, fetch)] * (2 if how == "twice" else 1)
            offset += stored.nbytes + draw(st.sampled_from([0, 0, 0, 2, 100]))
    return size, needs


def marked(needs: list[Need]) -> np.ndarray[Any, Any]:
    """How often each byte of the files is needed."""
    counts = np.zeros((len(FILES), 1 << 20), dtype=int)
    for need in needs:
        for offset, length in need.stored.byte_ranges():
            counts[need.file, offset : offset + length] += 1
    return counts


@given(needs_of_ranks(), st.sampled_from([8, 64, 1 << 20]), st.sampled_from([16, 200]))
def test_each_needed_byte_is_fetched_once(drawn, direct, limit) -> None:
    size, needs = drawn
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("DIRECT_BYTES", direct), ("RANGE_BYTES", 2 * limit), ("BLOCK_BYTES", limit)):
            patch.setattr(shares, name, value)
        blocks, ranges = divide(needs, size)
    wanted = marked(needs)
    fetched = np.zeros_like(wanted)
    met: dict[int, int] = {}
    for fetches, longest in ((blocks, limit), *((own, 2 * limit) for own in ranges)):
        for fetch in fetches:
            assert 0 < fetch.stop - fetch.start <= longest
            fetched[fetch.file, fetch.start : fetch.stop] += 1
            for need in fetch.needs:
                met[id(need)] = met.get(id(need), 0) + int(need.within(fetch.start, fetch.stop)[1].sum())
    assert fetched.max(initial=0) <= 1
    assert (fetched[wanted > 0] == 1).all()
    wasted = fetched.sum() - (wanted > 0).sum()
    assert wasted * shares.GAP_SHARE <= fetched.sum()
    for need in needs:
        assert met[id(need)] == need.stored.nbytes * needs.count(need)
    for rank, own in enumerate(ranges):
        assert all(need.rank == rank and need.stored.shortest_range >= direct for fetch in own for need in fetch.needs)


@given(needs_of_ranks())
def test_span_and_shortest_range_are_those_of_the_ranges(drawn) -> None:
    for need in drawn[1]:
        ranges = sorted(need.stored.byte_ranges())
        assert (need.start, need.stop) == (ranges[0][0], max(offset + length for offset, length in ranges))
        assert need.stored.shortest_range <= min(length for _, length in ranges)
        assert need.spans() == [(offset, offset + length) for offset, length in ranges]


def test_long_ranges_are_fetched_by_who_needs_them_unless_several_do(monkeypatch) -> None:
    monkeypatch.setattr(shares, "DIRECT_BYTES", 64)
    columns, rows, norm = (
        Stored(FILES[0], offset=offset, shape=shape, dtype=torch.int16)
        for offset, shape in ((8, (8, 16)), (264, (8, 16)), (520, (64,)))
    )
    needs = []
    for rank in range(2):
        column = columns.select(0, [(4 * rank, 4 * rank + 4)])
        row = rows.select(1, [(8 * rank, 8 * rank + 8)])
        needs += [Need(rank, 0, stored) for stored in (column, row, norm)]
    blocks, ranges = divide(needs, 2)
    assert [(fetch.start, fetch.stop) for fetch in blocks] == [(264, 648)]
    assert [[(fetch.start, fetch.stop) for fetch in own] for own in ranges] == [[(8, 136)], [(136, 264)]]


def test_a_part_goes_to_its_places_and_gaps_go_nowhere() -> None:
    stored = Stored(FILES[0], offset=10, shape=(4, 6), dtype=torch.uint8)
    destination = torch.zeros(4, 2, dtype=torch.uint8)
    need = Need(0, 0, stored.select(1, [(2, 4)]), destination)
    blocks, _ = divide([need], 1)
    (fetch,) = blocks[:1]
    data = np.arange(fetch.start, fetch.stop, dtype=np.uint8)
    at = 0
    for place in _places(fetch):
        place[:] = data[at : at + len(place)].tobytes()
        at += len(place)
    for other in blocks[1:]:
        for place in _places(other):
            place[:] = np.arange(other.start, other.stop, dtype=np.uint8).tobytes()
    expected = torch.arange(10, 34, dtype=torch.uint8).view(4, 6)[:, 2:4]
    assert torch.equal(destination, expected)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=9), st.booleans())
def test_ranges_are_copied_regular_or_not(ranges, regular) -> None:
    if regular:
        ranges = [ranges[0]] * len(ranges)
    lengths = np.array([length for length, _ in ranges])
    ends = np.cumsum([length + gap for length, gap in ranges])
    offsets = ends - np.array([length + gap for length, gap in ranges])
    starts = np.cumsum(lengths) - lengths
    source = np.arange(ends[-1], dtype=np.uint8)
    target = np.full(lengths.sum(), 255, dtype=np.uint8)
    _copy(target, starts, source, offsets, lengths)
    assert target.tolist() == [int(o) + i for o, n in zip(offsets, lengths, strict=True) for i in range(n)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_only_what_is_staged_goes_in_blocks(dtype, monkeypatch) -> None:
    monkeypatch.setattr(shares, "BLOCK_BYTES", 64)
    stored = Stored(FILES[0], offset=8, shape=(1, 7, 16), dtype=torch.int16)
    fetches = list(split_request(Request(stored, torch.empty(stored.shape, dtype=dtype))))
    assert [fetch.tensor.shape[1] for fetch in fetches] == ([7] if dtype == torch.int16 else [2, 2, 2, 1])
    assert not list(split_request(Request(stored.select(1, [(0, 0)]), torch.empty(1, 0, 16))))
