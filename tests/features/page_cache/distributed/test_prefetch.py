"""The cold cache that the ranks of a node fill together."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.loading.test_report import error_of, report, stored_bytes
from tp_transformers.checkpoint.reading.local_file import LocalFile
from tp_transformers.features.page_cache import prefetch


@pytest.mark.parametrize("evict", [False, True])
def test_the_ranks_of_a_node_fill_a_cold_cache_together(pool, cases, tmp_path, evict, monkeypatch) -> None:
    """Each byte once, whichever ranks need it; what they read then is in the cache, so that maps can be used."""
    case = cases(9, 3)
    folder = shutil.copytree(case.folder, tmp_path / "cold")
    ranks = pool.run(3, report, str(folder), True, evict)
    assert sum(rank["report"].prefetched for rank in ranks) == stored_bytes(str(folder))
    for rank in ranks:
        assert rank["read"] - rank["headers"] == rank["held"], "as from a warm cache"
        assert error_of(rank, case.reference) < 1e-4


def report_with(changes: dict[str, Any], folder: str, prefetches: bool | None, evict: bool) -> dict[str, Any]:
    """Run on every rank: the report of a load, where names of the prefetch have other values."""
    with mock.patch.multiple(prefetch, **changes):
        return report(folder, prefetches, evict)


def test_blocks_are_shared_out(pool, cases) -> None:
    case = cases(9, 3)
    ranks = pool.run(3, report_with, {"BLOCK_BYTES": 1000}, case.folder, True, True)
    total = stored_bytes(case.folder)
    assert sum(rank["report"].prefetched for rank in ranks) == total
    assert all(abs(rank["report"].prefetched - total / 3) < 0.1 * total for rank in ranks)


def one_page_missing(folder: str) -> dict[str, Any]:
    """A page of the third block of each file seems to be on disk only."""
    resident = LocalFile.is_resident

    def seeming(self: LocalFile, spans: Any) -> bool:
        spans = list(spans)
        return resident(self, spans) and not any(start <= 3500 < stop for start, stop in spans)

    with mock.patch.object(LocalFile, "is_resident", seeming):
        return report_with({"BLOCK_BYTES": 1000}, folder, None, False)


def test_only_the_blocks_that_are_missing_are_fetched(pool, cases) -> None:
    case = cases(9, 3)
    ranks = pool.run(2, one_page_missing, case.folder)
    files = len(list(Path(case.folder).glob("*.safetensors")))
    assert 0 < sum(rank["report"].prefetched for rank in ranks) <= 1000 * files
    assert all(error_of(rank, case.reference) < 1e-4 for rank in ranks)


def short_of_memory() -> int:
    return 1000


def test_a_cache_without_room_is_left_alone(pool, cases) -> None:
    case = cases(9, 3)
    for rank in pool.run(2, report_with, {"available_memory": short_of_memory}, case.folder, True, False):
        assert rank["report"].prefetched == 0
        assert error_of(rank, case.reference) < 1e-4


def on_nodes_of_their_own(folder: str, how: list[bool | None]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    return report_with({"node_name": lambda: f"node {rank}"}, folder, how[rank], False)


@pytest.mark.parametrize("how", [[None, True], [True, False]], ids=str)
def test_a_cold_node_beside_one_that_is_not(pool, cases, how) -> None:
    """Nodes decide for themselves whether they fill their caches, and still meet in the same collectives."""
    case = cases(9, 3)
    ranks = pool.run(2, on_nodes_of_their_own, case.folder, how)
    for wanted, rank in zip(how, ranks, strict=True):
        assert (rank["report"].prefetched > 0) == bool(wanted)
        assert error_of(rank, case.reference) < 1e-4
