"""The sources of new shards, on tensors that count their indices: every index comes once, from who holds it."""

from collections import Counter
from itertools import product

import pytest
import torch

from tp_transformers.features.reshard.pieces import CHECKPOINT, assign
from tp_transformers.features.reshard.table import Entry, describe_sources
from tp_transformers.slices.layout import Layout, Ranks, Split, chunked, heads, interleaved, packed

SIZES = [1, 2, 3, 4, 5]


def splits(size: int) -> dict[str, Split]:
    """Splits of 24 indices of every kind: even, in units, by shares, replicated, packed, interleaved."""
    query, pair = heads(12, 3, Ranks(size))
    return {
        "apportion": Ranks(size).split(24),
        "units": Ranks(size).split(24, unit=5),
        "shares": Ranks(size, tuple(range(1, size + 1))).split(24),
        "chunked": chunked(24, size),
        "query heads": query.scaled(2),
        "replicated": pair.scaled(8),
        "packed": packed([Ranks(size).split(10), Ranks(size).split(14)]),
        "interleaved": interleaved(*heads(16, 4, Ranks(size))),
        "everywhere": Split(24, (((0, 24),),) * size),
    }


def check(new: Split, old: Split, survivors: dict[int, int]) -> Counter[int]:
    """Build every new shard from its pieces, and compare with slices of `arange`; returns what was sent."""
    full, sent = torch.arange(new.length), Counter[int]()
    held = {rank: old.ranges[was] for rank, was in survivors.items()}
    shards = {rank: torch.cat([full[a:b] for a, b in ranges]) for rank, ranges in held.items()}
    everywhere = set().union(*(shard.tolist() for shard in shards.values()))
    for rank, pieces in assign(dict(enumerate(new.ranges)), held, sent, 3).items():
        expected = torch.cat([full[a:b] for a, b in new.ranges[rank]])
        found = torch.full_like(expected, -1)
        for piece in pieces:
            place = found[piece.at : piece.at + piece.length]
            assert (place == -1).all(), "an index that comes twice"
            indices = full[piece.start : piece.start + piece.length]
            if piece.source == CHECKPOINT:
                assert not everywhere & set(indices.tolist()), "a read of what a rank holds"
                place.copy_(indices)
            else:
                place.copy_(shards[piece.source][piece.local : piece.local + piece.length])
                own = set(shards[rank].tolist()) if rank in shards else set()
                assert piece.source == rank or not own & set(indices.tolist()), "a message of what is here"
            assert torch.equal(place, indices)
        assert torch.equal(found, expected)
    return sent


@pytest.mark.parametrize(("before", "after"), [*product(SIZES, SIZES)])
def test_every_index_of_every_new_shard_has_one_source(before, after) -> None:
    for old, new in zip(splits(before).values(), splits(after).values(), strict=True):
        check(new, old, {rank: rank for rank in range(before)})


@pytest.mark.parametrize(("before", "lost"), [(2, 0), (3, 1), (4, 3), (5, 2)])
def test_after_a_loss_only_what_nobody_holds_is_read(before, lost) -> None:
    left = [rank for rank in range(before) if rank != lost]
    for (_, old), (_, new) in product(splits(before).items(), splits(before - 1).items()):
        if old.length == new.length:
            check(new, old, dict(enumerate(left)))


def test_ranks_that_hold_the_same_send_the_same_amounts() -> None:
    everywhere = Split(24, (((0, 24),),) * 3)
    held = {rank: everywhere.ranges[rank] for rank in range(3)}
    sent = Counter[int]()
    for _ in range(2):
        assign({rank: [(0, 24)] for rank in (3, 4, 5)}, held, sent)
    assert sent == {0: 48, 1: 48, 2: 48}


def test_bytes_by_source_add_up_to_the_new_shards() -> None:
    table = {
        "rows": Entry((24, 5), torch.float32, Layout(0, Ranks(3).split(24))),
        "columns": Entry((7, 24), torch.bfloat16, Layout(1, chunked(24, 3))),
        "norm": Entry((24,), torch.float32, None),
        "scale": Entry((), torch.float32, None),
    }
    layouts = {
        "rows": Layout(0, Ranks(2).split(24)),
        "columns": Layout(0, Ranks(2).split(7)),
        "norm": None,
        "scale": None,
    }
    plan = describe_sources(table, layouts, {0: 0, 1: 1, 2: 2}, range(2))
    for name, entry in table.items():
        layout = layouts[name]
        for rank in range(2):
            shape = entry.shape if layout is None else layout.local_shape(entry.shape, rank)
            nbytes = torch.Size(shape).numel() * entry.dtype.itemsize
            assert sum(count for (_, receiver), count in plan[name].items() if receiver == rank) == nbytes
    assert plan["norm"] == {(0, 0): 96, (1, 1): 96}
    assert plan["rows"] == {(0, 0): 160, (1, 0): 80, (1, 1): 80, (2, 1): 160}
